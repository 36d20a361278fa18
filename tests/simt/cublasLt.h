// The part of cuBLASLt that csrc/cuda calls, on the host: one matrix product with a GELU epilogue,
// column-major, as the library's documentation has it. What the library would refuse or read out of
// bounds raises std::logic_error, so that descriptors are tested and not only the sums.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "simt.h"

enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
enum cublasLtEpilogue_t {
  CUBLASLT_EPILOGUE_DEFAULT = 1,
  CUBLASLT_EPILOGUE_BIAS = 4,
  CUBLASLT_EPILOGUE_GELU = 32,
  CUBLASLT_EPILOGUE_GELU_BIAS = 32 | 4,
  CUBLASLT_EPILOGUE_GELU_AUX = 32 | 128,
  CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 32 | 128 | 4,
  CUBLASLT_EPILOGUE_DGELU = 64 | 128
};
enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
  CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};
enum cublasLtReductionScheme_t { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };

using cublasLtHandle_t = struct cublasLtContext*;

namespace simt_cublaslt {

inline void expect(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error("cublasLt stand-in: " + what);
}

// Descriptors made and not destroyed. A product holds five.
inline int living = 0;
constexpr int kPerProduct = 5;

// Times that the library was asked for an algorithm.
inline int questions = 0;

using Attributes = std::map<int, std::vector<char>>;

template <class T>
T get(const Attributes& attributes, int attribute, T otherwise) {
  const auto found = attributes.find(attribute);
  if (found == attributes.end()) return otherwise;
  T value;
  expect(found->second.size() == sizeof(T), "an attribute has the wrong size");
  std::memcpy(&value, found->second.data(), sizeof(T));
  return value;
}

inline void put(Attributes& attributes, int attribute, const void* value, size_t bytes) {
  const auto* from = static_cast<const char*>(value);
  attributes[attribute] = {from, from + bytes};
}

}  // namespace simt_cublaslt

extern "C" inline __attribute__((visibility("default"), used)) int simt_cublaslt_questions() {
  return simt_cublaslt::questions;
}

struct cublasLtMatmulDescOpaque_t {
  cublasComputeType_t compute;
  simt_cublaslt::Attributes attributes;
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType_t type;
  uint64_t rows, cols;
  int64_t ld;
};
struct cublasLtMatmulPreferenceOpaque_t {
  simt_cublaslt::Attributes attributes;
};
using cublasLtMatmulDesc_t = cublasLtMatmulDescOpaque_t*;
using cublasLtMatrixLayout_t = cublasLtMatrixLayoutOpaque_t*;
using cublasLtMatmulPreference_t = cublasLtMatmulPreferenceOpaque_t*;
struct cublasLtMatmulAlgo_t {
  uint32_t alignments[4];  // of a, b, c, d, as the preference promised
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
};

inline cublasStatus_t cublasLtMatmulDescCreate(
    cublasLtMatmulDesc_t* made, cublasComputeType_t compute, cudaDataType_t scale) {
  simt_cublaslt::expect(scale == CUDA_R_32F, "the scale type must be fp32");
  *made = new cublasLtMatmulDescOpaque_t{compute, {}};
  ++simt_cublaslt::living;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) {
  delete made;
  --simt_cublaslt::living;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t made, cublasLtMatmulDescAttributes_t attribute, const void* value,
    size_t bytes) {
  simt_cublaslt::put(made->attributes, attribute, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t* made, cudaDataType_t type, uint64_t rows, uint64_t cols, int64_t ld) {
  simt_cublaslt::expect(
      ld >= static_cast<int64_t>(rows), "a leading dimension is below the number of rows");
  *made = new cublasLtMatrixLayoutOpaque_t{type, rows, cols, ld};
  ++simt_cublaslt::living;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) {
  delete made;
  --simt_cublaslt::living;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = new cublasLtMatmulPreferenceOpaque_t;
  ++simt_cublaslt::living;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
  delete made;
  --simt_cublaslt::living;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t made, cublasLtMatmulPreferenceAttributes_t attribute,
    const void* value, size_t bytes) {
  simt_cublaslt::put(made->attributes, attribute, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

namespace simt_cublaslt {

inline float read(const void* data, cudaDataType_t type, int64_t i) {
  switch (type) {
    case CUDA_R_16F:
      return static_cast<const c10::Half*>(data)[i];
    case CUDA_R_16BF:
      return static_cast<const c10::BFloat16*>(data)[i];
    default:
      return static_cast<const float*>(data)[i];
  }
}
inline void write(void* data, cudaDataType_t type, int64_t i, float value) {
  switch (type) {
    case CUDA_R_16F:
      static_cast<c10::Half*>(data)[i] = value;
      break;
    case CUDA_R_16BF:
      static_cast<c10::BFloat16*>(data)[i] = value;
      break;
    default:
      static_cast<float*>(data)[i] = value;
  }
}

inline double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
inline double gelu_slope(double x) {
  const double k = std::sqrt(2 / M_PI), t = std::tanh(k * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x);
}

struct Epilogue {
  explicit Epilogue(const Attributes& a)
      : kind(get<cublasLtEpilogue_t>(a, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT)),
        bias(get<const void*>(a, CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr)),
        aux(get<void*>(a, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, nullptr)),
        aux_ld(get<int64_t>(a, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 0)) {}
  bool has(int bit) const { return (kind & bit) == bit; }
  bool gradient() const { return has(64); }

  cublasLtEpilogue_t kind;
  const void* bias;
  void* aux;
  int64_t aux_ld;
};

inline void check_epilogue(const Epilogue& epilogue, const cublasLtMatrixLayoutOpaque_t& d) {
  expect(
      epilogue.has(CUBLASLT_EPILOGUE_BIAS) == (epilogue.bias != nullptr),
      "a bias goes with an epilogue that adds it");
  expect(epilogue.has(128) == (epilogue.aux != nullptr), "an auxiliary matrix, likewise");
  if (epilogue.aux == nullptr) return;
  expect(epilogue.aux_ld % 8 == 0, "the auxiliary's leading dimension is a multiple of 8");
  expect(
      epilogue.aux_ld >= static_cast<int64_t>(d.rows),
      "the auxiliary's leading dimension is at least the number of rows of d");
  expect(reinterpret_cast<uintptr_t>(epilogue.aux) % 16 == 0, "the auxiliary starts on 16 bytes");
}

}  // namespace simt_cublaslt

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
    int wanted, cublasLtMatmulHeuristicResult_t* results, int* found) {
  using namespace simt_cublaslt;
  ++questions;
  expect(wanted == 1, "one algorithm is asked for");
  expect(living <= kPerProduct, "descriptors of an earlier product still live");
  check_epilogue(Epilogue(desc->attributes), *d);
  expect(
      get<uint32_t>(preference->attributes, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 7) ==
          CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
      "partial sums must be kept in fp32");
  for (int i = 0; i < 4; ++i)
    results->algo.alignments[i] =
        get<uint32_t>(preference->attributes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i, 256);
  // Stands for what the library has no kernel for: the caller must go another way.
  *found = d->rows == 8 * 13 ? 0 : 1;
  return *found == 1 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

inline cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
    cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
    const void* beta, const void* c, cublasLtMatrixLayout_t, void* d,
    cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo, void*, size_t,
    cudaStream_t) {
  using namespace simt_cublaslt;
  const bool ta = get(desc->attributes, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N) == CUBLAS_OP_T;
  const bool tb = get(desc->attributes, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N) == CUBLAS_OP_T;
  const auto m = static_cast<int64_t>(ta ? a_layout->cols : a_layout->rows);
  const auto k = static_cast<int64_t>(ta ? a_layout->rows : a_layout->cols);
  const auto n = static_cast<int64_t>(tb ? b_layout->rows : b_layout->cols);
  expect(k == static_cast<int64_t>(tb ? b_layout->cols : b_layout->rows), "inner dims differ");
  expect(
      m == static_cast<int64_t>(d_layout->rows) && n == static_cast<int64_t>(d_layout->cols),
      "d has other dims than the product");
  expect(
      *static_cast<const float*>(alpha) == 1.0f && *static_cast<const float*>(beta) == 0.0f,
      "alpha is 1, beta 0");
  const void* const pointers[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i)
    expect(
        reinterpret_cast<uintptr_t>(pointers[i]) % algo->alignments[i] == 0,
        "a matrix is less aligned than the preference promised");
  const Epilogue epilogue(desc->attributes);
  expect(epilogue.aux != d, "the auxiliary is d");
  const cudaDataType_t type = d_layout->type;
  expect(a_layout->type == type && b_layout->type == type, "types differ");
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      double z = 0;
      for (int64_t l = 0; l < k; ++l)
        z += static_cast<double>(read(a, type, ta ? l + i * a_layout->ld : i + l * a_layout->ld)) *
             read(b, type, tb ? j + l * b_layout->ld : l + j * b_layout->ld);
      if (epilogue.bias != nullptr) z += read(epilogue.bias, type, i);
      const int64_t at = i + j * epilogue.aux_ld;
      if (epilogue.gradient()) {
        z *= gelu_slope(read(epilogue.aux, type, at));
      } else {
        if (epilogue.aux != nullptr) write(epilogue.aux, type, at, static_cast<float>(z));
        z = gelu(z);
      }
      write(d, type, i + j * d_layout->ld, static_cast<float>(z));
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
