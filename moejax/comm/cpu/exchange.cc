// An exchange between devices of several processes on CPU, beside which a program goes on computing.
//
// XLA calls gloo from the thread that runs the program, which then computes nothing until the bytes
// have arrived, and gloo uses a link between two devices in one direction after the other. Here each
// device has a thread that sends and receives: one call begins an exchange, and another hands XLA a
// future of its end. What a device sends to another keeps the order in which exchanges began;
// otherwise they run at the same time, as two that use a link in opposite directions.
// comm/cpu/peers.py connects the sockets, and comm/cpu/exchange.py says what is sent to whom.

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
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

// Writes the sums of the numbers in two arrays of so many bytes.
using Add = void (*)(const char* a, const char* b, char* sum, size_t bytes);

template <typename T, typename Sum>
void AddEach(const char* a, const char* b, char* sum, size_t bytes, Sum add) {
  for (size_t i = 0; i < bytes; i += sizeof(T)) {
    T x, y;
    std::memcpy(&x, a + i, sizeof x);
    std::memcpy(&y, b + i, sizeof y);
    x = add(x, y);
    std::memcpy(sum + i, &x, sizeof x);
  }
}

template <typename T>
void AddNumbers(const char* a, const char* b, char* sum, size_t bytes) {
  AddEach<T>(a, b, sum, bytes, [](T x, T y) { return x + y; });
}

float FromBfloat16(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// To the nearest, or the even one of two.
uint16_t ToBfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void AddBfloat16(const char* a, const char* b, char* sum, size_t bytes) {
  AddEach<uint16_t>(a, b, sum, bytes, [](uint16_t x, uint16_t y) {
    return ToBfloat16(FromBfloat16(x) + FromBfloat16(y));
  });
}

// How numbers of a type are added; null where no collective needs it.
Add AddOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return AddNumbers<float>;
    case ffi::DataType::S32:  // wraps as U32 does
    case ffi::DataType::U32:
      return AddNumbers<uint32_t>;
    case ffi::DataType::BF16:
      return AddBfloat16;
    default:
      return nullptr;
  }
}

// One message of an exchange: where it lies, or comes.
struct Part {
  int64_t device;  // the peer
  char* data;
  size_t* arrived = nullptr;      // of a receive: bytes that can go on
  const size_t* ready = nullptr;  // of a send: bytes that can go; null: all
  const char* own = nullptr;      // of a receive: what is added to what comes
  Add add = nullptr;
};

// One way of one exchange with one peer: the header, then the payload.
struct Stream {
  int fd;
  Part part;
  bool send;  // or receive
  Header header, expected;
  size_t bytes;
  size_t* open;  // streams of the exchange that have not ended
  size_t done = 0;

  size_t total() const { return sizeof(Header) + bytes; }
  bool finished() const { return done == total(); }

  // The position up to which it can move now.
  size_t end() const {
    if (done < sizeof(Header)) return sizeof(Header);
    return part.ready ? sizeof(Header) + *part.ready : total();
  }

  // Moves what the socket takes or has now; returns what went wrong, or nothing.
  std::string Move() {
    while (done < end()) {
      char piece[1 << 15];
      bool head = done < sizeof(Header), adds = !head && part.add;
      size_t place = head ? done : done - sizeof(Header);
      // Numbers of 4 bytes or 2: what has come of one waits for the rest.
      size_t rest = adds ? place % 4 : 0;
      char* at = (head ? reinterpret_cast<char*>(&header) : part.data) + place;
      size_t left = end() - done;
      if (adds) {
        std::memcpy(piece, at - rest, rest);
        left = std::min(left, sizeof piece - rest);
      }
      char* to = adds ? piece + rest : at;
      ssize_t n = send ? ::send(fd, at, left, MSG_NOSIGNAL) : ::recv(fd, to, left, 0);
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return "";
      if (n < 0 && errno == EINTR) continue;
      if (n == 0 || (n < 0 && (errno == ECONNRESET || errno == EPIPE))) {
        return "device " + Name() + " has gone: it closed its connection";
      }
      if (n < 0) return std::string(strerror(errno)) + ", exchange with device " + Name();
      done += static_cast<size_t>(n);
      if (adds) {
        size_t whole = place + n == bytes ? rest + n : (rest + n) / 4 * 4;
        part.add(piece, part.own + place - rest, at - rest, whole);
        std::memcpy(at - rest + whole, piece + whole, rest + n - whole);
      }
      if (part.arrived && !head) {
        *part.arrived = done == total() || !adds ? done - sizeof(Header) : (place + n) / 4 * 4;
      }
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

  std::string Name() const { return std::to_string(part.device); }
};

// What goes to a peer and what comes from it, each in order.
struct Peer {
  int fd = -1;
  uint64_t sent = 0, received = 0;  // messages
  uint64_t bytes = 0;               // of payloads that were sent
  std::deque<Stream> ways[2];       // receives, sends
};

struct Task {
  char* receive;  // where the first part comes
  size_t bytes;   // of a part
  std::vector<Part> sends, receives;
  std::vector<size_t> arrived = {};  // of parts that go on
  uint32_t number = 0;
  size_t open = 0;  // streams that have not ended
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

// What the system refuses, in words.
std::system_error Refused(const char* what) {
  return std::system_error(errno, std::generic_category(), what);
}

// Where a device wakes its thread.
int OpenWake() {
  int wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake < 0) throw Refused("eventfd");
  return wake;
}

// Sends and receives for one device. What the system refuses is thrown.
class Device {
 public:
  explicit Device(int64_t id) : id_(id), wake_(OpenWake()) {
    try {
      thread_ = std::thread([this] { Run(); });
    } catch (const std::system_error&) {
      close(wake_);
      throw;
    }
  }

  // Takes the connection to a peer, unless it throws.
  void Add(int64_t peer, int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) throw Refused("fcntl");
    if (!peers_.emplace(peer, Peer{fd}).second) {
      throw std::runtime_error("device " + std::to_string(peer) + " is connected already");
    }
  }

  // Ends the thread, once nothing is under way, and closes the connections.
  ~Device() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    eventfd_write(wake_, 1);
    thread_.join();
    close(wake_);
    for (auto& peer : peers_) close(peer.second.fd);
  }

  int64_t id() const { return id_; }

  // Bytes of payloads that went to a peer, when nothing is under way.
  uint64_t Sent(int64_t peer) const {
    auto found = peers_.find(peer);
    return found == peers_.end() ? 0 : found->second.bytes;
  }

  // Queues an exchange, behind those that have begun before; returns its number.
  uint32_t Begin(Task task) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint32_t number = task.number = next_++;
    begun_[number].receive = task.receive;
    tasks_.push_back(std::move(task));
    eventfd_write(wake_, 1);
    return number;
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
    std::list<Task> running;
    std::string failed;
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      if (over_ && tasks_.empty() && running.empty()) return;
      std::deque<Task> added = std::move(tasks_);
      tasks_.clear();
      lock.unlock();
      for (Task& task : added) {
        running.push_back(std::move(task));
        if (failed.empty()) failed = Take(running.back());
      }
      if (failed.empty() && !running.empty()) failed = Move();
      for (auto task = running.begin(); task != running.end();) {
        if (task->open > 0 && failed.empty()) {
          ++task;
          continue;
        }
        End(task->number, failed);
        task = running.erase(task);
      }
      std::string wrong = Wait(failed.empty() && !running.empty());
      if (failed.empty()) failed = wrong;
    }
  }

  // Queues the streams of an exchange; returns what is wrong, or nothing.
  std::string Take(Task& task) {
    char* own = nullptr;
    for (const Part& part : task.sends) {
      if (part.device == id_) own = part.data;
    }
    for (bool send : {true, false}) {
      for (const Part& part : send ? task.sends : task.receives) {
        if (part.device == id_) {
          if (!send) std::memcpy(part.data, own, task.bytes);
          continue;
        }
        ++task.open;
        auto found = peers_.find(part.device);
        if (found == peers_.end()) return "no connection to device " + std::to_string(part.device);
        Peer& peer = found->second;
        Header header{send ? peer.sent++ : peer.received++, task.bytes};
        peer.ways[send].push_back({peer.fd, part, send, header, header, task.bytes, &task.open});
      }
    }
    return "";
  }

  // Moves what can be moved now, the first stream of each way; returns what went wrong, or nothing.
  std::string Move() {
    for (auto& [device, peer] : peers_) {
      for (auto& way : peer.ways) {
        while (!way.empty()) {
          std::string wrong = way.front().Move();
          if (!wrong.empty()) return wrong;
          if (!way.front().finished()) break;
          if (way.front().send) peer.bytes += way.front().bytes;
          --*way.front().open;
          way.pop_front();
        }
      }
    }
    return "";
  }

  // Waits until a task comes or, if `peers`, something can be moved; returns what went wrong, or
  // nothing. Without `peers`, some may be added meanwhile.
  std::string Wait(bool peers) {
    std::vector<pollfd> waits{{wake_, POLLIN, 0}};
    for (auto& [device, peer] : peers_) {
      if (!peers) break;
      auto can_move = [](auto& way) { return !way.empty() && way.front().done < way.front().end(); };
      int events = (can_move(peer.ways[0]) ? POLLIN : 0) | (can_move(peer.ways[1]) ? POLLOUT : 0);
      if (events) waits.push_back({peer.fd, static_cast<short>(events), 0});
    }
    if (poll(waits.data(), waits.size(), -1) < 0 && errno != EINTR) {
      std::string wrong = Refused("poll").what();
      usleep(1000);  // a failure that stays must not keep a core busy
      return wrong;
    }
    eventfd_t count;
    eventfd_read(wake_, &count);
    return "";
  }

  // Tells whoever waits for an exchange, now or later, that it has ended.
  void End(uint32_t number, const std::string& failed) {
    std::shared_ptr<ffi::Promise> promise;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = begun_.find(number);
      if (!found->second.promise) {
        found->second.ended = true;
        found->second.failed = failed;
        return;
      }
      promise = std::make_shared<ffi::Promise>(std::move(*found->second.promise));
      begun_.erase(found);
    }
    // A thread of its own goes on with the program, and this one with the other exchanges.
    try {
      std::thread([promise, failed] { Set(*promise, failed); }).detach();
    } catch (const std::system_error& error) {
      // The program cannot go on here: it might wait for what only this thread can send.
      Set(*promise, std::string("no thread goes on with the program: ") + error.what());
    }
  }

  int64_t id_;
  int wake_;
  std::mutex mutex_;
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

// The same along rings of devices, for a gather (`sum` false) or a sum of which each device keeps
// its part, [size, ...] -> [size, ...] with that part in its place. `rings` has each group in the
// order in which parts are passed on. A part goes on while it still comes.
ffi::Error StartRing(int32_t ordinal, ffi::AnyBuffer x, ffi::AnyBuffer after,
                     ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Buffer<ffi::U32>> number,
                     ffi::Span<const int64_t> rings, ffi::Span<const int64_t> places,
                     int64_t size, bool sum) {
  auto found = Devices().find(ordinal);
  auto own = std::find(rings.begin(), rings.end(), ordinal);
  if (found == Devices().end() || own == rings.end()) {
    return ffi::Error::Internal("this device is not connected");
  }
  Add add = sum ? AddOf(x.element_type()) : nullptr;
  if (sum && !add) return ffi::Error::Internal("numbers of this type are not added");
  size_t n = static_cast<size_t>(size), at = own - rings.begin(), start = at / n * n;
  char *out = static_cast<char*>(x.untyped_data()), *in = static_cast<char*>(y->untyped_data());
  Task task{in, y->size_bytes() / n};
  // Devices before this one in the ring, and the place of their part.
  auto before = [&](size_t steps) { return start + (at - start + n - steps % n) % n; };
  auto offset = [&](size_t steps) { return places[before(steps)] * task.bytes; };
  int64_t left = rings[before(1)], right = rings[before(n - 1)];
  if (!sum) std::memcpy(in + offset(0), out, task.bytes);
  task.arrived.resize(n - 1);
  task.sends.push_back({right, sum ? out + offset(1) : out});
  for (size_t i = 0; i + 1 < n; ++i) {
    size_t part = offset(i + 1 + sum);
    task.receives.push_back({left, in + part, &task.arrived[i], nullptr, out + part, add});
    if (i + 2 < n) task.sends.push_back({right, in + part, nullptr, &task.arrived[i]});
  }
  *number->typed_data() = found->second->Begin(std::move(task));
  return ffi::Error::Success();
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
  auto found = Devices().find(ordinal);
  if (found != Devices().end()) {
    return found->second->End(*number.typed_data(), moved ? nullptr : receive);
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  Set(promise, "this device is not connected");
  return future;
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(moejax_exchange_start_ring, StartRing,
                              Begins()
                                  .Attr<ffi::Span<const int64_t>>("rings")
                                  .Attr<ffi::Span<const int64_t>>("places")
                                  .Attr<int64_t>("size")
                                  .Attr<bool>("sum"));
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

// Does something and returns what went wrong, or null. The text is good until the next call.
template <typename Act>
const char* Told(Act act) {
  static auto* wrong = new std::string();
  try {
    act();
  } catch (const std::exception& error) {
    *wrong = error.what();
    return wrong->c_str();
  }
  return nullptr;
}

// Begins to send and receive for a device of this process; returns what went wrong, or null.
extern "C" const char* moejax_device(int64_t device) {
  return Told([=] {
    if (Devices().count(device)) throw std::runtime_error("the device has begun already");
    Devices()[device] = new Device(device);
  });
}

extern "C" void moejax_disconnect() {
  for (auto& device : Devices()) delete device.second;
  Devices().clear();
}

// Bytes of payloads that a device of this process has sent to a peer.
extern "C" uint64_t moejax_sent(int64_t device, int64_t peer) {
  auto found = Devices().find(device);
  return found == Devices().end() ? 0 : found->second->Sent(peer);
}

// Gives a device the connection to a peer; returns what went wrong, or null. The connection is
// closed with the device, and stays the caller's if something went wrong.
extern "C" const char* moejax_connect(int64_t device, int64_t peer, int fd) {
  return Told([=] {
    auto found = Devices().find(device);
    if (found == Devices().end()) throw std::runtime_error("the device is not of this process");
    found->second->Add(peer, fd);
  });
}
