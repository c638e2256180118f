// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "kernels/bf16.h"
#include "kernels/cpu_isa.h"
#include "kernels/fp16.h"

namespace crumb::models {
namespace {

using kernels::CpuIsa;

// Runs with every instruction set of the machine.
class MatmulTest : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!kernels::SelectCpuIsa(GetParam()))
      GTEST_SKIP() << "needs a CPU with " << kernels::CpuIsaName(GetParam());
    seed_ = std::random_device{}();
    random_.seed(seed_);
  }
  void TearDown() override { kernels::SelectCpuIsa(kernels::BestCpuIsa()); }

  // Random elements of `dtype`, stored one byte off alignment, and their values.
  Tensor RandomTensor(DType dtype, std::vector<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    std::normal_distribution<float> normal;
    storage_.assign(1 + count * DTypeBytes(dtype), std::byte{0});
    numbers_.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      std::byte* to = storage_.data() + 1 + i * DTypeBytes(dtype);
      float value = normal(random_);
      if (dtype == DType::kBf16) {
        const kernels::Bf16 half = kernels::Bf16FromFloat(value);
        std::memcpy(to, &half, 2);
        value = kernels::Bf16ToFloat(half);
      } else if (dtype == DType::kF16) {
        bool saturated = false;
        const uint16_t half = kernels::Fp16FromFloat(value, &saturated);
        std::memcpy(to, &half, 2);
        value = kernels::Fp16ToFloat(half);
      } else {
        std::memcpy(to, &value, 4);
      }
      numbers_[i] = value;
    }
    return {"t", "f", dtype, std::move(shape), std::span(storage_).subspan(1)};
  }

  std::vector<float> RandomRows(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> rows(count);
    for (float& value : rows) value = normal(random_);
    return rows;
  }

  uint32_t seed_ = 0;
  std::mt19937 random_;
  std::vector<std::byte> storage_;
  std::vector<float> numbers_;
};

TEST_P(MatmulTest, AgreesWithDoubles) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  ThreadPool pool(2);
  struct Shape {
    int n, rows, columns;
  };
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    for (const Shape& s :
         {Shape{1, 1, 1}, Shape{1, 70, 33}, Shape{3, 31, 64}, Shape{8, 33, 257}, Shape{9, 33, 257},
          Shape{13, 64, 512}, Shape{40, 95, 300}, Shape{1, 1024, 600}, Shape{70, 160, 80}}) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(dtype) << " " << s.n << " x " << s.rows << " x " << s.columns);
      const Matrix weight = Matrix::Of(RandomTensor(dtype, {s.rows, s.columns}));
      const std::vector<float> x = RandomRows(size_t{1} * s.n * s.columns);
      // The additional row shows that nothing is written after the end.
      std::vector<float> out(size_t{1} * (s.n + 1) * s.rows, -77.0f);
      Multiply(weight, s.n, x.data(), out.data(), pool);
      for (int i = 0; i < s.n; ++i) {
        for (int j = 0; j < s.rows; ++j) {
          double sum = 0.0;
          double magnitude = 0.0;
          for (int k = 0; k < s.columns; ++k) {
            const double product = double{x[i * s.columns + k]} * numbers_[j * s.columns + k];
            sum += product;
            magnitude += std::abs(product);
          }
          ASSERT_NEAR(out[i * s.rows + j], sum, 1e-6 * magnitude + 1e-12) << i << " " << j;
        }
      }
      for (int j = 0; j < s.rows; ++j) ASSERT_EQ(out[s.n * s.rows + j], -77.0f);
    }
  }
}

TEST_P(MatmulTest, WidensExactly) {
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    for (const int count : {1, 15, 16, 17, 100}) {
      EXPECT_EQ(ToFloats(RandomTensor(dtype, {count})), numbers_) << DTypeName(dtype);
    }
  }
}

TEST_P(MatmulTest, ProductKernelTakesStridesAndAdds) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  const int m = 7;
  const int n = 64;
  const int depth = 11;
  const int lda = 13;
  const int ldb = 70;
  const int ldc = 66;
  const std::vector<float> a = RandomRows(m * lda);
  const std::vector<float> b = RandomRows(depth * ldb);
  const std::vector<float> before = RandomRows(m * ldc);
  for (const bool accumulate : {false, true}) {
    std::vector<float> c = before;
    ActiveMatmulKernels().multiply(m, n, depth, a.data(), lda, b.data(), ldb, c.data(), ldc,
                                   accumulate);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < ldc; ++j) {
        double expected = before[i * ldc + j];
        if (j < n) {
          if (!accumulate) expected = 0.0;
          for (int k = 0; k < depth; ++k) expected += double{a[i * lda + k]} * b[k * ldb + j];
        }
        ASSERT_NEAR(c[i * ldc + j], expected, 1e-5) << i << " " << j;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, MatmulTest,
                         testing::Values(CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512),
                         [](const auto& isa) {
                           return isa.param == CpuIsa::kPortable ? "Portable"
                                  : isa.param == CpuIsa::kAvx2   ? "Avx2"
                                                                 : "Avx512";
                         });

}  // namespace
}  // namespace crumb::models
