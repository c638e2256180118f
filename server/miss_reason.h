// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb/v1/cache_service.pb.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// As the wire names it.
v1::MissReason ToProto(storage::MissReason reason);

}  // namespace crumb::server
