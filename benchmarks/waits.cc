// Waits that take no core, in place of what computes or sends.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

void Copy(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer>& y) {
  if (x.untyped_data() != y->untyped_data()) {
    std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  }
}

ffi::Future Until(Clock::time_point end) {
  ffi::Promise promise;
  ffi::Future future(promise);
  std::thread([promise = std::move(promise), end]() mutable {
    std::this_thread::sleep_until(end);
    promise.SetAvailable();
  }).detach();
  return future;
}

// Keeps the thread that runs the program.
ffi::Error Keeps(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, double seconds) {
  Copy(x, y);
  std::this_thread::sleep_for(Seconds(seconds));
  return ffi::Error::Success();
}

// Frees it.
ffi::Future Frees(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, double seconds) {
  Copy(x, y);
  return Until(Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds)));
}

// Frees it too. Waits so long a row, and after the other such waits of its device: a device computes
// one thing at a time.
ffi::Future Rows(int32_t device, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> sizes,
                 ffi::Result<ffi::AnyBuffer> y, double seconds) {
  static auto* mutex = new std::mutex();
  static auto* ends = new std::map<int32_t, Clock::time_point>();
  Copy(x, y);
  double rows = 0;
  for (size_t i = 0; i < sizes.element_count(); ++i) rows += sizes.typed_data()[i];
  std::lock_guard<std::mutex> lock(*mutex);
  Clock::time_point& end = (*ends)[device];
  end = std::max(end, Clock::now()) +
        std::chrono::duration_cast<Clock::duration>(Seconds(rows * seconds));
  return Until(end);
}

}  // namespace

#define WAIT(name, function)                                \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,             \
                                ffi::Ffi::Bind()            \
                                    .Arg<ffi::AnyBuffer>()  \
                                    .Ret<ffi::AnyBuffer>()  \
                                    .Attr<double>("seconds"))
WAIT(wait_keeps, Keeps);
WAIT(wait_frees, Frees);
XLA_FFI_DEFINE_HANDLER_SYMBOL(wait_rows, Rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<double>("seconds"));
