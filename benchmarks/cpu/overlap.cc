// Waits that take no core: one frees the thread that runs the program, the other keeps it.

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

void Copy(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer>& y) {
  if (x.untyped_data() != y->untyped_data()) {
    std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  }
}

ffi::Error Keep(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, double seconds) {
  Copy(x, y);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  return ffi::Error::Success();
}

ffi::Future Free(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, double seconds) {
  ffi::Promise promise;
  ffi::Future future(promise);
  Copy(x, y);
  std::thread([promise = std::move(promise), seconds]() mutable {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    promise.SetAvailable();
  }).detach();
  return future;
}

}  // namespace

#define WAIT(name, function)                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                         \
                                ffi::Ffi::Bind()                        \
                                    .Arg<ffi::AnyBuffer>()              \
                                    .Ret<ffi::AnyBuffer>()              \
                                    .Attr<double>("seconds"))
WAIT(overlap_keeps, Keep);
WAIT(overlap_frees, Free);
