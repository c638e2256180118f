// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/connection.h"

#include <utility>

#include "common/crc32c.h"

namespace crumb::transport {

void Connection::Send(OutgoingFrame frame, FetchId fetch, std::shared_ptr<const void> keep,
                      std::function<void()> sent) {
  frame.header.version = version;
  frame.header.connection = theirs;
  frame.header.fetch = fetch;
  if (frame.header.type != FrameType::kData) frame.header.body_sum = Crc32c(frame.body);
  link->Send(std::move(frame), std::move(keep), std::move(sent));
}

}  // namespace crumb::transport
