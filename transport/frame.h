// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/fetch.h"

// The frames between crumbds, whose bytes docs/formats/transport.md defines. Decoders accept
// hostile input and return kDataLoss for malformed bytes.
namespace crumb::transport {

// The range of protocol versions that this implementation supports.
inline constexpr uint16_t kVersionMin = 1;
inline constexpr uint16_t kVersionMax = 1;

struct FrameVersions {
  uint16_t min = kVersionMin;
  uint16_t max = kVersionMax;
};

// The longest body, in bytes, of any frame but kData. It bounds the memory that a peer can occupy,
// and has room for kFetchPagesMax pages and for the header of the largest fragment (frame.cc).
inline constexpr size_t kControlBodyMax = 512 << 10;

enum class FrameType : uint8_t { kHello = 1, kFetch = 2, kResponse = 3, kData = 4, kCancel = 5 };

// 48 bytes in front of every body, the same for all types: the last four fields concern kData only.
// Numbers are little-endian.
struct FrameHeader {
  FrameType type = FrameType::kHello;
  uint16_t version = kVersionMax;
  uint64_t connection = 0;  // the receiver's number of the connection; 0 in kHello
  uint64_t fetch = 0;
  uint32_t body_sum = 0;  // CRC-32C of the body; 0 in kData, whose tiles have checksums
  // kData: the body is tiles [first, first + count) of the delivered part of a page's fragment.
  uint32_t page = 0;
  uint16_t fragment = 0;
  uint32_t first = 0;
  uint32_t count = 0;
};

inline constexpr size_t kFrameHeaderBytes = 48;
using FrameHeaderBytes = std::array<std::byte, kFrameHeaderBytes>;

// Encode and decode the header. kDataLoss: the bytes are no header, or of an unknown type.
FrameHeaderBytes EncodeFrameHeader(const FrameHeader& header);
absl::StatusOr<FrameHeader> DecodeFrameHeader(std::span<const std::byte> bytes);
// Returns kDataLoss if a control frame's body does not have its header's checksum.
absl::Status CheckBody(const FrameHeader& header, std::span<const std::byte> body);

// The first frame in each direction.
struct Hello {
  uint16_t version_min = kVersionMin;
  uint16_t version_max = kVersionMax;
  uint64_t connection = 0;  // the sender's number, which its peer puts into later frames
};

// Encode and decode the body of a kHello. kDataLoss: it is malformed.
std::vector<std::byte> EncodeHello(const Hello& hello);
absl::StatusOr<Hello> DecodeHello(std::span<const std::byte> body);
// Returns the highest version that both sides support. kFailedPrecondition: there is none.
absl::StatusOr<uint16_t> CommonVersion(const Hello& ours, const Hello& theirs);

// The body of a kFetch.
struct FetchBody {
  struct Page {
    PageKey key;
    TileRange range;
    uint32_t tile_bytes = 0;
  };
  SessionToken session{};
  KeyspaceId keyspace;
  uint64_t generation = 0;
  // Microseconds until the requester's deadline. Clocks of nodes are not compared.
  uint64_t time_left_us = 0;
  std::vector<Page> pages;
};

// The largest number of pages in a kFetch: as many fit into kControlBodyMax (frame.cc).
inline constexpr size_t kFetchPagesMax = 8192;

// Encode and decode the body of a kFetch. kDataLoss: it is malformed, or has more than
// kFetchPagesMax pages.
std::vector<std::byte> EncodeFetch(const FetchBody& fetch);
absl::StatusOr<FetchBody> DecodeFetch(std::span<const std::byte> body);

// The body of a kResponse: consecutive pages from `first_page` on, with the encoded headers of
// their fragments. A long response consists of several frames.
//
// A page that is a hit has one header for each fragment that contributes tiles; the tiles follow in
// kData frames, in the order of pages and fragments.
struct ResponseBody {
  struct Page {
    PageStatus status = PageStatus::kAbsent;
    std::vector<std::span<const std::byte>> headers;  // refer to the encoded or decoded bytes
  };
  uint32_t first_page = 0;
  std::vector<Page> pages;
};

// Returns the encoded size of one page of a kResponse, in bytes.
size_t ResponsePageBytes(const ResponseBody::Page& page);
// Encode and decode the body of a kResponse; the decoded headers refer to `body`. kDataLoss: it is
// malformed.
std::vector<std::byte> EncodeResponse(const ResponseBody& response);
absl::StatusOr<ResponseBody> DecodeResponse(std::span<const std::byte> body);

}  // namespace crumb::transport
