// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/portable_simd.h"

#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/dequantize_tile.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/quantize_tile.h"

namespace crumb::kernels {

const KernelTable& PortableKernels() {
  using V = portable::Simd;
  static constexpr KernelTable kTable = {&QuantizeWholeTile<V>, &DequantizeWholeTile<V>,
                                         &RowsToModel<V>, &AttendRows<V>};
  return kTable;
}

}  // namespace crumb::kernels
