// cuBLASLt is column-major: the row-major out [M, N] = a b is its out^T [N, M] = b^T a^T, so b
// comes first and the bias lies along its rows.
#include "cublaslt.h"

#include <ATen/Context.h>
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#if !defined(FUSED_REMAT_SIMT)
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace fused_remat::cuda {
namespace {

using at::Tensor;

// The handle and the workspace are torch's own, of the current device and stream.
struct LtLibrary {
#if defined(FUSED_REMAT_SIMT)
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  static int64_t device() { return 0; }
#else
  cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  size_t workspace_bytes = at::cuda::getCUDABlasLtWorkspaceSize();
  void* workspace = at::cuda::getCUDABlasLtWorkspace();
  static int64_t device() { return c10::cuda::current_device(); }
#endif
};

void check(const char* call, cublasStatus_t status, const LtProduct& product) {
  TORCH_CHECK(
      status == CUBLAS_STATUS_SUCCESS, call, " failed with status ", static_cast<int>(status),
      " for ", product.a.sizes(), " times ", product.b.sizes(), " of ", product.a.scalar_type());
}

// A descriptor of the library, destroyed with this.
template <class Descriptor, cublasStatus_t (*kDestroy)(Descriptor)>
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (made != nullptr) kDestroy(made);
  }
  Descriptor made = nullptr;
};
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

cudaDataType_t data_type(const Tensor& matrix) {
  switch (matrix.scalar_type()) {
    case at::kHalf:
      return CUDA_R_16F;
    case at::kBFloat16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

cublasLtEpilogue_t epilogue_of(LtEpilogue epilogue, bool bias) {
  switch (epilogue) {
    case LtEpilogue::kGelu:
      return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case LtEpilogue::kGeluAux:
      return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case LtEpilogue::kGeluGradient:
      return CUBLASLT_EPILOGUE_DGELU;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

// A row-major matrix as cuBLASLt sees it: its transpose, or itself (`transposed`) where columns
// are dense.
struct Operand {
  explicit Operand(const Tensor& m)
      : transposed(m.stride(1) != 1 && m.size(1) != 1),
        rows(m.size(transposed ? 0 : 1)),
        cols(m.size(transposed ? 1 : 0)),
        ld(std::max(cols == 1 ? 1 : m.stride(transposed ? 1 : 0), rows)) {}
  cublasOperation_t op() const { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }
  // As of an expanded tensor: no leading dimension says so.
  static bool overlaps(const Tensor& m) {
    const Operand seen(m);
    return seen.cols > 1 && m.stride(seen.transposed ? 1 : 0) < seen.rows;
  }

  bool transposed;
  int64_t rows, cols, ld;
};

uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return static_cast<uint32_t>(std::min<uintptr_t>(address & (~address + 1), 256));
}

constexpr uintptr_t kEpilogueAlignment = 16;

bool starts_aligned(const Tensor& matrix, int64_t ld) {
  return reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kEpilogueAlignment == 0 &&
         ld * matrix.element_size() % kEpilogueAlignment == 0;
}

cublasComputeType_t compute_type(const LtProduct& product) {
  // Not allowTF32CuBLAS(): that raises where only torch's newer flag was set.
  const bool tf32 =
      product.a.scalar_type() == at::kFloat &&
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
          at::Float32Precision::TF32;
  return tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

class Call {
 public:
  Call(const LtProduct& product, LtEpilogue epilogue) : product_(product) {
    describe_operation(epilogue);
    describe(a_, product.b, first_);
    describe(b_, product.a, second_);
    describe(out_, product.out, Operand(product.out));
    describe_preference();
  }

  // nullopt where the library has none.
  std::optional<cublasLtMatmulAlgo_t> algorithm() {
    cublasLtMatmulHeuristicResult_t found = {};
    int n_found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        library_.handle, operation_.made, a_.made, b_.made, out_.made, out_.made, preference_.made,
        1, &found, &n_found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || n_found == 0) return std::nullopt;
    check("cublasLtMatmulAlgoGetHeuristic", status, product_);
    return found.algo;
  }

  void run(const cublasLtMatmulAlgo_t& algorithm, Stream stream) {
    const float one = 1.0f, zero = 0.0f;
    void* const out = product_.out.mutable_data_ptr();
    check(
        "cublasLtMatmul",
        cublasLtMatmul(
            library_.handle, operation_.made, &one, product_.b.const_data_ptr(), a_.made,
            product_.a.const_data_ptr(), b_.made, &zero, out, out_.made, out, out_.made, &algorithm,
            library_.workspace, library_.workspace_bytes, stream),
        product_);
  }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(
        "cublasLtMatmulDescSetAttribute",
        cublasLtMatmulDescSetAttribute(operation_.made, attribute, &value, sizeof(value)),
        product_);
  }
  template <class T>
  void prefer(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    check(
        "cublasLtMatmulPreferenceSetAttribute",
        cublasLtMatmulPreferenceSetAttribute(preference_.made, attribute, &value, sizeof(value)),
        product_);
  }

  void describe(Layout& layout, const Tensor& matrix, const Operand& operand) {
    check(
        "cublasLtMatrixLayoutCreate",
        cublasLtMatrixLayoutCreate(
            &layout.made, data_type(matrix), operand.rows, operand.cols, operand.ld),
        product_);
  }

  void describe_operation(LtEpilogue epilogue) {
    check(
        "cublasLtMatmulDescCreate",
        cublasLtMatmulDescCreate(&operation_.made, compute_type(product_), CUDA_R_32F), product_);
    set(CUBLASLT_MATMUL_DESC_TRANSA, first_.op());
    set(CUBLASLT_MATMUL_DESC_TRANSB, second_.op());
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(epilogue, product_.bias.has_value()));
    if (product_.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product_.bias->const_data_ptr());
    if (!product_.aux.defined()) return;
    const int64_t ld = Operand(product_.aux).ld;
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product_.aux.const_data_ptr());
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ld);
  }

  void describe_preference() {
    check(
        "cublasLtMatmulPreferenceCreate", cublasLtMatmulPreferenceCreate(&preference_.made),
        product_);
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, library_.workspace_bytes);
    // Partial sums in fp32 and in a fixed order, which is within every setting of torch's flags for
    // reductions in less precision.
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
    const auto align = [&](cublasLtMatmulPreferenceAttributes_t attribute, const Tensor& matrix) {
      prefer(attribute, alignment_of(matrix.const_data_ptr()));
    };
    align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, product_.b);
    align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, product_.a);
    align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, product_.out);
    align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, product_.out);
  }

  const LtProduct& product_;
  const LtLibrary library_;
  const Operand first_{product_.b}, second_{product_.a};
  Operation operation_;
  Layout a_, b_, out_;
  Preference preference_;
};

// All that an algorithm was chosen by: shapes, how operands lie, dtype, sums, epilogue, device.
using Kind = std::array<int64_t, 18>;

Kind kind_of(const LtProduct& product, LtEpilogue epilogue) {
  const Operand first(product.b), second(product.a), out(product.out);
  const auto alignment = [](const Tensor& m) -> int64_t {
    return alignment_of(m.const_data_ptr());
  };
  return {
      out.rows,
      out.cols,
      product.a.size(1),
      first.op(),
      second.op(),
      first.ld,
      second.ld,
      out.ld,
      alignment(product.b),
      alignment(product.a),
      alignment(product.out),
      product.aux.defined() ? Operand(product.aux).ld : 0,
      product.aux.defined() ? alignment(product.aux) : 0,
      product.bias ? alignment(*product.bias) : 0,
      data_type(product.a),
      compute_type(product),
      epilogue_of(epilogue, product.bias.has_value()),
      LtLibrary::device()};
}

// The library's answer, which is remembered: a refusal holds for every tile of every step.
std::optional<cublasLtMatmulAlgo_t> algorithm_of(const LtProduct& product, LtEpilogue epilogue) {
  constexpr size_t kMostKinds = 4096;  // where token counts change from step to step
  static std::mutex mutex;
  static std::map<Kind, std::optional<cublasLtMatmulAlgo_t>> answers;
  const Kind kind = kind_of(product, epilogue);
  const std::lock_guard lock(mutex);
  const auto known = answers.find(kind);
  if (known != answers.end()) return known->second;
  if (answers.size() >= kMostKinds) answers.clear();
  return answers[kind] = Call(product, epilogue).algorithm();
}

// What needs no question to the library.
const char* why_not_operands(const LtProduct& product) {
  const at::ScalarType dtype = product.a.scalar_type();
  if (dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16)
    return "the dtype is none of float32, float16 and bfloat16";
  if (product.b.scalar_type() != dtype || product.out.scalar_type() != dtype ||
      (product.bias && product.bias->scalar_type() != dtype))
    return "the operands have different dtypes";
  if (dtype == at::kHalf && at::globalContext().allowFP16AccumulationCuBLAS())
    return "sums in float16 are asked for";
  // The library refuses matrices of one column or row here and there.
  if (product.out.numel() == 0 || product.a.size(1) < 2 || product.out.size(1) < 2)
    return "a matrix is too small";
  if (product.bias && !product.bias->is_contiguous()) return "the bias is not contiguous";
  // It is read in vectors as wide as those of the result.
  if (product.bias && !starts_aligned(*product.bias, 0))
    return "the bias does not start at 16 bytes";
  const auto aligned = [](const Tensor& matrix) {
    const Operand operand(matrix);
    return (matrix.stride(1) == 1 || matrix.size(1) == 1 || matrix.stride(0) == 1 ||
            matrix.size(0) == 1) &&
           starts_aligned(matrix, operand.ld);
  };
  for (const Tensor& matrix : {product.a, product.b, product.out})
    if (Operand::overlaps(matrix)) return "rows of a matrix overlap";
  for (const Tensor& matrix : {product.a, product.b, product.out})
    if (!aligned(matrix)) return "rows of a matrix do not start at 16 bytes";
  if (Operand(product.out).transposed) return "the rows of the result are not dense";
  if (product.aux.defined() && (Operand(product.aux).ld % 8 != 0 || !aligned(product.aux)))
    return "rows of the auxiliary matrix do not start at 16 bytes";
  return nullptr;
}

}  // namespace

const char* why_not_lt(const LtProduct& product, LtEpilogue epilogue) {
  if (const char* reason = why_not_operands(product)) return reason;
  return algorithm_of(product, epilogue) ? nullptr : "the library has no algorithm";
}

void lt_multiply(const LtProduct& product, LtEpilogue epilogue, Stream stream) {
  const std::optional<cublasLtMatmulAlgo_t> algorithm = algorithm_of(product, epilogue);
  TORCH_INTERNAL_ASSERT(algorithm, "why_not_lt was not asked");
  Call(product, epilogue).run(*algorithm, stream);
}

}  // namespace fused_remat::cuda
