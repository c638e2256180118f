// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb_blocks.h"

// Implements the functions of crumb_blocks.h for an engine's blocks.
namespace crumb::c_api {

crumb_code GeometryOfBlocks(const crumb_worker_options* options, crumb_block_geometry* out);
crumb_code BlockAttentionOpen(const crumb_worker_options* options, crumb_block_attention** out);
void BlockAttentionClose(crumb_block_attention* attention);
crumb_code BlockAttend(crumb_block_attention* attention, uint32_t layer,
                       const crumb_block_pool* pool, const crumb_block_batch* batch,
                       const crumb_block_rows* rows);

crumb_code DeviceBlocksOpen(crumb_device* device, const crumb_worker_options* options,
                            const crumb_device_block_options* device_options,
                            crumb_device_blocks** out);
void DeviceBlocksClose(crumb_device_blocks* blocks);
uint64_t DeviceBlocksBytes(const crumb_device_blocks* blocks);
crumb_code DeviceBlocksPrepare(crumb_device_blocks* blocks, const crumb_block_pool* pool,
                               const crumb_block_batch* batch, const crumb_block_step* step,
                               void* stream);
crumb_code DeviceBlocksAttend(crumb_device_blocks* blocks, uint32_t layer,
                              const crumb_block_pool* pool, const crumb_block_rows* rows,
                              void* stream);
crumb_code DeviceBlocksCheck(crumb_device_blocks* blocks);

crumb_code TransferUseBlocks(crumb_transfer* transfer, const crumb_block_cache* cache);

}  // namespace crumb::c_api
