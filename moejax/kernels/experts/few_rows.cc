// Products of a few rows and the matrices of their groups, on CPU.
//
// Reading the matrices takes longer than the products. XLA copies a matrix that a loop slices out of
// an array; here matrices are read where they lie, once for each `kMostRows` rows, and only those that
// have rows.
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

// Columns of a tile: for more than `kVeryFew` rows so few that their sums stay in a core's cache.
// Otherwise memory decides, which is read faster in longer runs.
constexpr int64_t kVeryFew = 8, kTile = 512, kLongTile = 2048;
constexpr int64_t kMostRows = 32;  // of a part

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

// Adds to sums of `Rows` rows the products with `Depth` rows of a matrix, in `n` columns. Sums of
// rows lie `Stride` apart.
template <int Rows, int Depth, int64_t Stride, typename T>
inline void Add(const float* x, int64_t K, const T* w, int64_t N, float* sums, int64_t n) {
  float factor[Rows][Depth];
  for (int r = 0; r < Rows; ++r)
    for (int k = 0; k < Depth; ++k) factor[r][k] = x[r * K + k];
  float* __restrict__ sum = sums;
  for (int64_t j = 0; j < n; ++j)
    for (int r = 0; r < Rows; ++r) {
      float product = 0;
      for (int k = 0; k < Depth; ++k) product += factor[r][k] * Read(w[k * N + j]);
      sum[r * Stride + j] += product;
    }
}

// Rows of a group, and a tile of columns of its matrix.
struct Part {
  int64_t group, first, rows, column, columns;
};

// The same for all rows of a part.
template <int Depth, int64_t Stride, typename T>
inline void AddToRows(
    const Part& part, const float* x, int64_t K, const T* w, int64_t N, float* sums) {
  int64_t n = part.columns, r = 0;
  if (Stride == kLongTile)
    for (; r + 4 <= part.rows; r += 4)
      Add<4, Depth, Stride>(x + r * K, K, w, N, sums + r * Stride, n);
  for (; r + 2 <= part.rows; r += 2)
    Add<2, Depth, Stride>(x + r * K, K, w, N, sums + r * Stride, n);
  if (r < part.rows) Add<1, Depth, Stride>(x + r * K, K, w, N, sums + r * Stride, n);
}

template <int64_t Stride, typename T>
void Multiply(const Part& part, const float* x, const T* w, T* y, int64_t K, int64_t N) {
  static thread_local std::vector<float> sums;
  sums.assign(part.rows * Stride, 0);
  x += part.first * K;
  w += part.group * K * N + part.column;
  int64_t k = 0;
  for (; k + 4 <= K; k += 4) AddToRows<4, Stride>(part, x + k, K, w + k * N, N, sums.data());
  for (; k < K; ++k) AddToRows<1, Stride>(part, x + k, K, w + k * N, N, sums.data());
  for (int64_t r = 0; r < part.rows; ++r)
    for (int64_t j = 0; j < part.columns; ++j)
      Write(sums[r * Stride + j], y + (part.first + r) * N + part.column + j);
}

std::vector<Part> Cut(const int32_t* sizes, int64_t G, int64_t M, int64_t N, int64_t threads) {
  // A tile is not longer than leaves one for each thread.
  int64_t met = std::count_if(sizes, sizes + G, [](int32_t size) { return size > 0; });
  int64_t fair = met * N / (threads * kTile) * kTile;
  int64_t long_tile = std::clamp(fair, kTile, kLongTile), first = 0;
  std::vector<Part> parts;
  for (int64_t g = 0; g < G; ++g) {
    int64_t rows = std::clamp<int64_t>(sizes[g], 0, M - first);
    int64_t tile = rows <= kVeryFew ? long_tile : kTile;
    for (int64_t column = 0; column < N; column += tile)
      for (int64_t row = 0; row < rows; row += kMostRows) {
        int64_t own = std::min(kMostRows, rows - row);
        parts.push_back({g, first + row, own, column, std::min(tile, N - column)});
      }
    first += rows;
  }
  return parts;
}

// What threads take in turn. A thread that comes late finds nothing left.
struct Turns {
  int64_t count;
  std::atomic<int64_t> next{0}, done{0};

  template <typename Run>
  void Take(const Run& run) {
    for (int64_t turn; (turn = next.fetch_add(1)) < count;) {
      run(turn);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

template <typename Run>
void InThreads(ffi::ThreadPool pool, int64_t count, Run run) {
  auto turns = std::make_shared<Turns>();
  turns->count = count;
  int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([turns, run] { turns->Take(run); });
  turns->Take(run);
  while (turns->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

template <ffi::DataType Type, typename T>
ffi::Error FewRows(
    ffi::ThreadPool pool, ffi::Buffer<Type> x_MK, ffi::Buffer<Type> w_GKN,
    ffi::Buffer<ffi::S32> sizes_G, ffi::ResultBuffer<Type> y_MN) {
  int64_t M = x_MK.dimensions()[0], K = x_MK.dimensions()[1];
  int64_t G = w_GKN.dimensions()[0], N = w_GKN.dimensions()[2];
  int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  auto parts =
      std::make_shared<const std::vector<Part>>(Cut(sizes_G.typed_data(), G, M, N, threads));
  int64_t rows = 0;
  for (const Part& part : *parts) rows = std::max(rows, part.first + part.rows);
  const T* given = static_cast<const T*>(x_MK.untyped_data());
  auto x = std::make_shared<std::vector<float>>(rows * K);
  for (int64_t i = 0; i < rows * K; ++i) (*x)[i] = Read(given[i]);
  const T* w = static_cast<const T*>(w_GKN.untyped_data());
  T* y = static_cast<T*>(y_MN->untyped_data());
  std::memset(y + rows * N, 0, (M - rows) * N * sizeof(T));
  InThreads(pool, parts->size(), [=](int64_t number) {
    const Part& part = (*parts)[number];
    auto multiply = part.rows <= kVeryFew ? Multiply<kLongTile, T> : Multiply<kTile, T>;
    multiply(part, x->data(), w, y, K, N);
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
