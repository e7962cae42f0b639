// Products of a few rows and the matrices of their groups, on CPU.
//
// Reading the matrices takes longer than the products. XLA copies a matrix that a loop slices out of
// an array; here matrices are read where they lie, each once, and only those that have rows.
// kernels/experts/blocked_mlp.py calls it. Letters as there: M rows, G groups, K summed over, N columns.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Columns of a tile: part of a memory page, and the sums of some rows stay in a core's cache.
constexpr int64_t kColumns = 512;

struct Bfloat16 {
  uint16_t bits;
};

inline float Read(float x) { return x; }

inline float Read(Bfloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

inline void Write(float x, float* y) { *y = x; }

// To the nearest, or the even one of two.
inline void Write(float x, Bfloat16* y) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = x != x ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1);
  y->bits = static_cast<uint16_t>(bits >> 16);
}

// Adds to sums of `Rows` rows the products with `Depth` rows of a matrix. `n` columns.
template <int Rows, int Depth, typename T>
inline void Add(const float* x, int64_t K, const T* w, int64_t N, float* sums, int64_t n) {
  float factor[Rows][Depth];
  for (int r = 0; r < Rows; ++r)
    for (int k = 0; k < Depth; ++k) factor[r][k] = x[r * K + k];
  float* __restrict__ sum = sums;
  for (int64_t j = 0; j < n; ++j)
    for (int r = 0; r < Rows; ++r) {
      float part = 0;
      for (int k = 0; k < Depth; ++k) part += factor[r][k] * Read(w[k * N + j]);
      sum[r * kColumns + j] += part;
    }
}

template <int Depth, typename T>
inline void AddToRows(
    const float* x, int64_t rows, int64_t K, const T* w, int64_t N, float* sums, int64_t n) {
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) Add<2, Depth>(x + r * K, K, w, N, sums + r * kColumns, n);
  if (r < rows) Add<1, Depth>(x + r * K, K, w, N, sums + r * kColumns, n);
}

struct Group {
  int64_t number, first, rows;
};

// The product of a group's rows and a tile of columns of its matrix.
template <typename T>
void Multiply(Group group, const float* x, const T* w, T* y, int64_t K, int64_t N, int64_t column) {
  static thread_local std::vector<float> sums;
  int64_t n = std::min(kColumns, N - column), k = 0;
  sums.assign(group.rows * kColumns, 0);
  const float* own = x + group.first * K;
  const T* tile = w + group.number * K * N + column;
  for (; k + 4 <= K; k += 4) AddToRows<4>(own + k, group.rows, K, tile + k * N, N, sums.data(), n);
  for (; k < K; ++k) AddToRows<1>(own + k, group.rows, K, tile + k * N, N, sums.data(), n);
  for (int64_t r = 0; r < group.rows; ++r)
    for (int64_t j = 0; j < n; ++j)
      Write(sums[r * kColumns + j], y + (group.first + r) * N + column + j);
}

// Parts of a product, which threads take in turn. A thread that comes late finds none left.
struct Parts {
  int64_t count;
  std::atomic<int64_t> next{0}, done{0};

  template <typename Run>
  void Take(const Run& run) {
    for (int64_t part; (part = next.fetch_add(1)) < count;) {
      run(part);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

template <typename Run>
void InThreads(ffi::ThreadPool pool, int64_t count, Run run) {
  auto parts = std::make_shared<Parts>();
  parts->count = count;
  int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([parts, run] { parts->Take(run); });
  parts->Take(run);
  while (parts->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

template <ffi::DataType Type, typename T>
ffi::Error FewRows(
    ffi::ThreadPool pool, ffi::Buffer<Type> x_MK, ffi::Buffer<Type> w_GKN,
    ffi::Buffer<ffi::S32> sizes_G, ffi::ResultBuffer<Type> y_MN) {
  int64_t M = x_MK.dimensions()[0], K = x_MK.dimensions()[1];
  int64_t G = w_GKN.dimensions()[0], N = w_GKN.dimensions()[2], rows = 0;
  auto groups = std::make_shared<std::vector<Group>>();
  for (int64_t g = 0; g < G; ++g) {
    int64_t size = std::min<int64_t>(sizes_G.typed_data()[g], M - rows);
    if (size > 0) groups->push_back({g, rows, size});
    rows += std::max<int64_t>(size, 0);
  }
  const T* given = static_cast<const T*>(x_MK.untyped_data());
  auto x = std::make_shared<std::vector<float>>(rows * K);
  for (int64_t i = 0; i < rows * K; ++i) (*x)[i] = Read(given[i]);
  const T* w = static_cast<const T*>(w_GKN.untyped_data());
  T* y = static_cast<T*>(y_MN->untyped_data());
  std::memset(y + rows * N, 0, (M - rows) * N * sizeof(T));
  int64_t tiles = (N + kColumns - 1) / kColumns;
  InThreads(pool, groups->size() * tiles, [=](int64_t part) {
    Multiply((*groups)[part / tiles], x->data(), w, y, K, N, part % tiles * kColumns);
  });
  return ffi::Error::Success();
}

template <ffi::DataType Type>
auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .template Arg<ffi::Buffer<Type>>()
      .template Arg<ffi::Buffer<Type>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Ret<ffi::Buffer<Type>>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    moejax_few_rows_float32, (FewRows<ffi::F32, float>), Bind<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    moejax_few_rows_bfloat16, (FewRows<ffi::BF16, Bfloat16>), Bind<ffi::BF16>());
