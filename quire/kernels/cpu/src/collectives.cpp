// Collectives and links among the processes of one host, through memory that they share. They may stand
// at other addresses in each process, so that memory holds no pointers.

#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "waiting.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {
namespace {

// Nanoseconds. Ranks may have to share a core: one that waits leaves it to others soon.
constexpr int64_t kAwake = 4000, kYielding = 60000;
[[maybe_unused]] constexpr int64_t kNap = 50000;

// A number that one rank counts up, and that others wait for. It wraps around.
struct alignas(64) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> num_asleep;

  // Publishes what was written before.
  void set(uint32_t to) {
    value.store(to);
    if (num_asleep.load() != 0) wake_all();
  }

  // Waits until it is no longer `seen`, and acquires what was published; false if that takes longer than
  // `timeout`. `started` is 0, or when a wait of the same operation began.
  bool wait_while(uint32_t seen, int64_t timeout, int64_t& started) {
    const auto has_come = [&] { return value.load(std::memory_order_acquire) != seen; };
    if (is_met_soon(has_come, kAwake, kYielding, started)) return true;
    // No wake-up is missed: see `Waiters` in waiting.h.
    num_asleep.fetch_add(1);
    bool has_changed = value.load() != seen;
    for (int64_t left; !has_changed && (left = started + timeout - nanoseconds()) > 0;) {
      sleep_while(seen, left);
      has_changed = value.load() != seen;
    }
    num_asleep.fetch_sub(1);
    return has_changed;
  }

 private:
#ifdef __linux__
  void sleep_while(uint32_t seen, int64_t most) {
    const timespec time{static_cast<time_t>(most / 1000000000), static_cast<long>(most % 1000000000)};
    syscall(SYS_futex, &value, FUTEX_WAIT, seen, &time, nullptr, 0);
  }
  void wake_all() { syscall(SYS_futex, &value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
#else
  void sleep_while(uint32_t, int64_t most) {
    const timespec time{0, static_cast<long>(most < kNap ? most : kNap)};
    nanosleep(&time, nullptr);
  }
  void wake_all() {}
#endif
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "locks are not shared by processes");

// One rank's place among those that do collectives together; mirrored by `Meeting` in collectives.py.
//
// Its region has a counter for each rank and two slots for each, which take turns. A rank copies its
// values into its slot, says that it has arrived, and reads the others' slots once they have arrived too.
// Who has arrived for operation n + 1 is done with reading the slots of n; so these may be written again
// for n + 2, and no second meeting is needed. All ranks must do the same operations in the same order.
struct Meeting {
  void* region;
  int64_t slot_bytes;
  int64_t timeout;  // nanoseconds
  int32_t rank;
  int32_t num_ranks;

  Counter& arrived(int32_t of) const { return static_cast<Counter*>(region)[of]; }

  uint8_t* slot(int32_t of, uint32_t operation) const {
    uint8_t* slots = static_cast<uint8_t*>(region) + num_ranks * sizeof(Counter);
    return slots + ((operation & 1) * num_ranks + of) * slot_bytes;
  }

  // The operation that this rank arrives for next.
  uint32_t next() const { return arrived(rank).value.load(std::memory_order_relaxed) + 1; }

  // Returns 0, or 1 + a rank that did not come in time.
  int32_t arrive(uint32_t operation) const {
    arrived(rank).set(operation);
    int64_t started = 0;
    for (int32_t other = 0; other < num_ranks; ++other)
      if (other != rank && !await(arrived(other), operation, started)) return 1 + other;
    return 0;
  }

 private:
  bool await(Counter& counter, uint32_t operation, int64_t& started) const {
    for (;;) {
      const uint32_t seen = counter.value.load(std::memory_order_acquire);
      if (static_cast<int32_t>(seen - operation) >= 0) return true;  // one ahead at most
      if (!counter.wait_while(seen, timeout, started)) return false;
    }
  }
};

// One end of a stream of messages from one process to another; mirrored by `Ring` in collectives.py.
// The region has the numbers of bytes that were written and read, then the last `capacity` of them.
struct Ring {
  void* region;
  int64_t capacity;  // a power of two, at most 2^31: positions wrap around at 2^32
  int64_t timeout;   // nanoseconds without progress

  static constexpr int64_t kHeader = 2 * sizeof(Counter);

  // False if the other end does not move on.
  bool write(const void* data, int64_t size) const {
    const uint8_t* from = static_cast<const uint8_t*>(data);
    return move(written(), read(), capacity, size, [&](uint8_t* ring, int64_t done, int64_t some) {
      std::memcpy(ring, from + done, some);
    });
  }
  bool read(void* data, int64_t size) const {
    uint8_t* to = static_cast<uint8_t*>(data);
    return move(read(), written(), 0, size, [&](const uint8_t* ring, int64_t done, int64_t some) {
      std::memcpy(to + done, ring, some);
    });
  }

 private:
  Counter& written() const { return static_cast<Counter*>(region)[0]; }
  Counter& read() const { return static_cast<Counter*>(region)[1]; }

  // `own` may be ahead of `other` by `lead` bytes.
  template <typename Copy>
  bool move(Counter& own, Counter& other, int64_t lead, int64_t size, Copy copy) const {
    uint8_t* data = static_cast<uint8_t*>(region) + kHeader;
    uint32_t position = own.value.load(std::memory_order_relaxed);
    for (int64_t done = 0; done < size;) {
      const uint32_t seen = other.value.load(std::memory_order_acquire);
      // As unsigned numbers, since positions wrap around.
      int64_t some = static_cast<uint32_t>(seen + static_cast<uint32_t>(lead) - position);
      if (some == 0) {
        int64_t started = 0;
        if (!other.wait_while(seen, timeout, started)) return false;
        continue;
      }
      const int64_t start = position & (capacity - 1);
      if (some > size - done) some = size - done;
      if (some > capacity - start) some = capacity - start;
      copy(data + start, done, some);
      done += some;
      own.set(position += static_cast<uint32_t>(some));
    }
    return true;
  }
};

float bfloat16_to_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

uint16_t float_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Sums in the order of ranks, in float32: all ranks get the same bits.
template <typename T, typename ToFloat, typename FromFloat>
void sum(const Meeting& meeting, uint32_t operation, T* out, int64_t count, ToFloat widen,
         FromFloat narrow) {
  constexpr int64_t kAtOnce = 256;
  float total[kAtOnce];
  for (int64_t first = 0; first < count; first += kAtOnce) {
    const int64_t size = count - first < kAtOnce ? count - first : kAtOnce;
    for (int32_t rank = 0; rank < meeting.num_ranks; ++rank) {
      const T* x = reinterpret_cast<const T*>(meeting.slot(rank, operation)) + first;
      for (int64_t i = 0; i < size; ++i) total[i] = rank == 0 ? widen(x[i]) : total[i] + widen(x[i]);
    }
    for (int64_t i = 0; i < size; ++i) out[first + i] = narrow(total[i]);
  }
}

enum Dtype : int32_t { kFloat32, kBfloat16, kFloat16 };

enum Outcome : int32_t { kDone, kTimedOut, kOtherSize };

}  // namespace
}  // namespace quire

using quire::Meeting;
using quire::Ring;

#pragma GCC visibility push(default)
extern "C" {

// Bytes of the region of a group, which must be zeros at first.
int64_t quire_region_bytes(int32_t num_ranks, int64_t slot_bytes) {
  return num_ranks * (static_cast<int64_t>(sizeof(quire::Counter)) + 2 * slot_bytes);
}

// The sum of all ranks' `x`, in place. Returns 0, or 1 + a rank that did not come in time.
int32_t quire_all_reduce(const Meeting* meeting, void* x, int64_t count, int32_t dtype) {
  const int64_t size = dtype == quire::kFloat32 ? 4 : 2, most = meeting->slot_bytes / size;
  uint8_t* bytes = static_cast<uint8_t*>(x);
  for (int64_t first = 0; first < count; first += most) {
    const int64_t some = count - first < most ? count - first : most;
    uint8_t* values = bytes + first * size;
    const uint32_t operation = meeting->next();
    std::memcpy(meeting->slot(meeting->rank, operation), values, some * size);
    if (const int32_t missing = meeting->arrive(operation)) return missing;
    uint16_t* halves = reinterpret_cast<uint16_t*>(values);
    if (dtype == quire::kFloat32) {
      const auto same = [](float value) { return value; };
      sum(*meeting, operation, reinterpret_cast<float*>(values), some, same, same);
    } else if (dtype == quire::kBfloat16) {
      sum(*meeting, operation, halves, some, quire::bfloat16_to_float, quire::float_to_bfloat16);
    } else {
      sum(*meeting, operation, halves, some, quire::half_to_float, quire::float_to_half);
    }
  }
  return 0;
}

// All ranks' `x` of `num_bytes` each, in the order of ranks.
int32_t quire_all_gather(const Meeting* meeting, const void* x, void* out, int64_t num_bytes) {
  for (int64_t first = 0; first < num_bytes; first += meeting->slot_bytes) {
    const int64_t left = num_bytes - first, some = left < meeting->slot_bytes ? left : meeting->slot_bytes;
    const uint32_t operation = meeting->next();
    std::memcpy(meeting->slot(meeting->rank, operation), static_cast<const uint8_t*>(x) + first, some);
    if (const int32_t missing = meeting->arrive(operation)) return missing;
    for (int32_t rank = 0; rank < meeting->num_ranks; ++rank)
      std::memcpy(static_cast<uint8_t*>(out) + rank * num_bytes + first, meeting->slot(rank, operation),
                  some);
  }
  return 0;
}

// The `x` of rank `source`, to all others.
int32_t quire_broadcast(const Meeting* meeting, void* x, int64_t num_bytes, int32_t source) {
  for (int64_t first = 0; first < num_bytes; first += meeting->slot_bytes) {
    const int64_t left = num_bytes - first, some = left < meeting->slot_bytes ? left : meeting->slot_bytes;
    const uint32_t operation = meeting->next();
    uint8_t *slot = meeting->slot(source, operation), *part = static_cast<uint8_t*>(x) + first;
    if (meeting->rank == source) std::memcpy(slot, part, some);
    if (const int32_t missing = meeting->arrive(operation)) return missing;
    if (meeting->rank != source) std::memcpy(part, slot, some);
  }
  return 0;
}

// Bytes of the region of a ring, which must be zeros at first.
int64_t quire_ring_bytes(int64_t capacity) { return Ring::kHeader + capacity; }

// Returns once all is in the ring: a message that is longer waits for its receiver.
int32_t quire_send(const Ring* ring, const void* x, int64_t num_bytes) {
  const bool is_done = ring->write(&num_bytes, sizeof num_bytes) && ring->write(x, num_bytes);
  return is_done ? quire::kDone : quire::kTimedOut;
}

// The next message, which must have `num_bytes`.
int32_t quire_receive(const Ring* ring, void* out, int64_t num_bytes) {
  int64_t sent;
  if (!ring->read(&sent, sizeof sent)) return quire::kTimedOut;
  if (sent != num_bytes) return quire::kOtherSize;
  return ring->read(out, num_bytes) ? quire::kDone : quire::kTimedOut;
}

// Publishes what was written before to processes that see `value` at the address.
void quire_publish(int64_t* at, int64_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

// The number at an address, once it is not `seen` or `awake` nanoseconds have passed.
int64_t quire_watch(const int64_t* at, int64_t seen, int64_t awake) {
  int64_t found, started = 0;
  const auto has_changed = [&] { return (found = __atomic_load_n(at, __ATOMIC_ACQUIRE)) != seen; };
  if (!has_changed()) quire::is_met_soon(has_changed, quire::kAwake, awake, started);
  return found;
}

}  // extern "C"
#pragma GCC visibility pop
