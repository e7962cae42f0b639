// An exchange between devices of several processes on CPU, beside which a program goes on computing.
//
// XLA calls gloo from the thread that runs the program, which then computes nothing until the bytes
// have arrived, and gloo uses a link between two devices in one direction after the other. Here each
// device has a thread that sends and receives: one call begins an exchange, and another hands XLA a
// future of its end. comm/exchange.py connects the sockets and says what is sent to whom.

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Goes ahead of every message, so that two devices notice when they no longer speak of the same one.
struct Header {
  uint64_t number;
  uint64_t bytes;
};

struct Peer {
  int fd = -1;
  uint64_t sent = 0, received = 0;  // messages
};

// One way of one exchange with one peer: the header, then the payload.
struct Stream {
  Peer* peer;
  int64_t device;
  char* data;
  bool send;  // or receive
  Header header, expected;
  size_t bytes, done = 0;

  size_t total() const { return sizeof(Header) + bytes; }
  bool finished() const { return done == total(); }

  // Moves what the socket takes or has now; returns what went wrong, or nothing.
  std::string Move() {
    while (!finished()) {
      bool head = done < sizeof(Header);
      char* at = head ? reinterpret_cast<char*>(&header) + done : data + (done - sizeof(Header));
      size_t left = (head ? sizeof(Header) : total()) - done;
      ssize_t n = send ? ::send(peer->fd, at, left, MSG_NOSIGNAL) : ::recv(peer->fd, at, left, 0);
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return "";
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return std::string(strerror(errno)) + ", exchange with device " + Name();
      if (n == 0) return "device " + Name() + " has gone: it closed its connection";
      done += static_cast<size_t>(n);
      if (!send && done == sizeof(Header) &&
          (header.number != expected.number || header.bytes != expected.bytes)) {
        return "device " + Name() + " sends message " + std::to_string(header.number) + " of " +
               std::to_string(header.bytes) + " bytes where message " +
               std::to_string(expected.number) + " of " + std::to_string(expected.bytes) +
               " bytes was expected: the processes do not run the same program";
      }
    }
    return "";
  }

  std::string Name() const { return std::to_string(device); }
};

// What goes to a device, or comes from it.
struct Part {
  int64_t device;
  char* data;
};

struct Task {
  char* receive;  // where the first part comes
  size_t bytes;   // of a part
  std::vector<Part> sends, receives;
  uint32_t number = 0;
};

// An exchange that has begun. Whichever comes first, its end or the call that waits for it, leaves
// word for the other.
struct Begun {
  char* receive;
  bool ended = false;
  std::string failed;
  std::optional<ffi::Promise> promise;
};

// Whoever sets a promise goes on with the program.
void Set(ffi::Promise& promise, const std::string& failed) {
  if (failed.empty()) {
    promise.SetAvailable();
  } else {
    promise.SetError(ffi::Error::Internal(failed));
  }
}

// Sends and receives for one device, one exchange after the other.
class Device {
 public:
  explicit Device(int64_t id) : id_(id), thread_([this] { Run(); }) {}

  void Add(int64_t peer, int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    peers_[peer].fd = fd;
  }

  // Ends the thread, once nothing is under way, and closes the connections.
  ~Device() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
      ready_.notify_one();
    }
    thread_.join();
    for (auto& peer : peers_) close(peer.second.fd);
  }

  int64_t id() const { return id_; }

  // Queues an exchange, behind those that have begun before; returns its number.
  uint32_t Begin(Task task) {
    std::lock_guard<std::mutex> lock(mutex_);
    task.number = next_++;
    begun_[task.number].receive = task.receive;
    tasks_.push_back(std::move(task));
    ready_.notify_one();
    return next_ - 1;
  }

  // The end of an exchange whose rows come to `receive`.
  ffi::Future End(uint32_t number, char* receive) {
    ffi::Promise promise;
    ffi::Future future(promise);
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = begun_.find(number);
    if (found == begun_.end() || found->second.receive != receive) {
      Set(promise, "the memory of exchange " + std::to_string(number) + " was moved");
    } else if (found->second.ended) {
      Set(promise, found->second.failed);
      begun_.erase(found);
    } else {
      found->second.promise = std::move(promise);
    }
    return future;
  }

 private:
  void Run() {
    std::string failed;
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return over_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (failed.empty()) failed = Exchange(task);
      lock.lock();
      auto found = begun_.find(task.number);
      if (!found->second.promise) {
        found->second.ended = true;
        found->second.failed = failed;
        continue;
      }
      // A thread of its own goes on with the program, and this one with the next exchange.
      std::thread([promise = std::move(*found->second.promise), failed]() mutable {
        Set(promise, failed);
      }).detach();
      begun_.erase(found);
    }
  }

  std::string Exchange(Task& task) {
    std::vector<Stream> streams;
    char* own = nullptr;
    for (auto [device, data] : task.sends) {
      if (device == id_) {
        own = data;
        continue;
      }
      auto peer = peers_.find(device);
      if (peer == peers_.end()) return "no connection to device " + std::to_string(device);
      Header header{peer->second.sent++, task.bytes};
      streams.push_back({&peer->second, device, data, true, header, {}, task.bytes});
    }
    for (auto [device, data] : task.receives) {
      if (device == id_) {
        std::memcpy(data, own, task.bytes);
        continue;
      }
      auto peer = peers_.find(device);
      if (peer == peers_.end()) return "no connection to device " + std::to_string(device);
      Header expected{peer->second.received++, task.bytes};
      streams.push_back({&peer->second, device, data, false, {}, expected, task.bytes});
    }
    while (true) {
      std::vector<pollfd> waits;
      for (Stream& stream : streams) {
        std::string wrong = stream.Move();
        if (!wrong.empty()) return wrong;
        short event = stream.send ? POLLOUT : POLLIN;
        if (!stream.finished()) waits.push_back({stream.peer->fd, event, 0});
      }
      if (waits.empty()) return "";
      if (poll(waits.data(), waits.size(), -1) < 0 && errno != EINTR) return strerror(errno);
    }
  }

  int64_t id_;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Task> tasks_;
  std::map<uint32_t, Begun> begun_;
  uint32_t next_ = 0;
  std::map<int64_t, Peer> peers_;
  bool over_ = false;
  std::thread thread_;
};

// By their ids, which XLA passes as the ordinal of the device that runs a program.
std::map<int64_t, Device*>& Devices() {
  static auto* devices = new std::map<int64_t, Device*>();  // their threads outlive the program
  return *devices;
}

// Begins an exchange and returns at once. `after` is there for the order in which exchanges begin.
ffi::Error Start(int32_t ordinal, ffi::AnyBuffer x, ffi::AnyBuffer after,
                 ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Buffer<ffi::U32>> number,
                 ffi::Span<const int64_t> groups, int64_t size, bool gather) {
  auto found = Devices().find(ordinal);
  for (size_t start = 0; start < groups.size(); start += static_cast<size_t>(size)) {
    std::vector<int64_t> group(groups.begin() + start, groups.begin() + start + size);
    for (int64_t member : group) {
      if (found == Devices().end() || member != found->second->id()) continue;
      char *out = static_cast<char*>(x.untyped_data()), *in = static_cast<char*>(y->untyped_data());
      Task task{in, y->size_bytes() / static_cast<size_t>(size)};
      for (size_t i = 0; i < group.size(); ++i) {
        task.sends.push_back({group[i], out + (gather ? 0 : i * task.bytes)});
        task.receives.push_back({group[i], in + i * task.bytes});
      }
      *number->typed_data() = found->second->Begin(std::move(task));
      return ffi::Error::Success();
    }
  }
  return ffi::Error::Internal("this device is not connected");
}

// The same where a device sends to one other and receives from one, or neither: `pairs` are the
// senders and receivers in turns. Zeros come to who receives nothing.
ffi::Error StartPairs(int32_t ordinal, ffi::AnyBuffer x, ffi::AnyBuffer after,
                      ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Buffer<ffi::U32>> number,
                      ffi::Span<const int64_t> pairs) {
  auto found = Devices().find(ordinal);
  if (found == Devices().end()) return ffi::Error::Internal("this device is not connected");
  int64_t id = found->second->id();
  Task task{static_cast<char*>(y->untyped_data()), y->size_bytes()};
  for (size_t i = 0; i < pairs.size(); i += 2) {
    int64_t sender = pairs[i], receiver = pairs[i + 1];
    if (sender == id) task.sends.push_back({receiver, static_cast<char*>(x.untyped_data())});
    if (receiver == id) task.receives.push_back({sender, task.receive});
  }
  if (task.receives.empty()) std::memset(task.receive, 0, task.bytes);
  *number->typed_data() = found->second->Begin(std::move(task));
  return ffi::Error::Success();
}

// Waits for an exchange, and keeps until then the memory that it reads and writes.
ffi::Future Done(int32_t ordinal, ffi::AnyBuffer y, ffi::AnyBuffer x,
                 ffi::Buffer<ffi::U32> number, ffi::Result<ffi::AnyBuffer> result) {
  char* receive = static_cast<char*>(y.untyped_data());
  bool moved = receive != result->untyped_data();
  return Devices()[ordinal]->End(*number.typed_data(), moved ? nullptr : receive);
}

// Reads its arguments after all that makes them, and so keeps their memory from being used again.
ffi::Error Hold(ffi::RemainingArgs arguments, ffi::Result<ffi::AnyBuffer> result) {
  auto first = arguments.get<ffi::AnyBuffer>(0);
  if (!first.has_value()) return first.error();
  if (first->untyped_data() != result->untyped_data()) {
    std::memcpy(result->untyped_data(), first->untyped_data(), first->size_bytes());
  }
  return ffi::Error::Success();
}

// What both calls that begin an exchange take and return.
auto Begins() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::Buffer<ffi::U32>>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(moejax_exchange_start, Start,
                              Begins()
                                  .Attr<ffi::Span<const int64_t>>("groups")
                                  .Attr<int64_t>("size")
                                  .Attr<bool>("gather"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(moejax_exchange_start_pairs, StartPairs,
                              Begins().Attr<ffi::Span<const int64_t>>("pairs"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(moejax_exchange_done, Done,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moejax_hold, Hold,
                              ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>());

extern "C" void moejax_device(int64_t device) { Devices()[device] = new Device(device); }

extern "C" void moejax_disconnect() {
  for (auto& device : Devices()) delete device.second;
  Devices().clear();
}

extern "C" void moejax_connect(int64_t device, int64_t peer, int fd) {
  Devices()[device]->Add(peer, fd);
}
