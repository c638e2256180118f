// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb.h"

// Implements the functions of crumb.h for attention over an engine's blocks.
namespace crumb::c_api {

crumb_code GeometryOfBlocks(const crumb_worker_options* options, crumb_block_geometry* out);
crumb_code BlockAttentionOpen(const crumb_worker_options* options, crumb_block_attention** out);
void BlockAttentionClose(crumb_block_attention* attention);
crumb_code BlockAttend(crumb_block_attention* attention, uint32_t layer,
                       const crumb_block_pool* pool, const crumb_block_batch* batch,
                       const crumb_block_rows* rows);

}  // namespace crumb::c_api
