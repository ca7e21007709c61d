// Collectives among the processes of one host, through memory that they share.
//
// A region has a seat for each rank and two slots for each, which take turns. A rank copies its values
// into its slot, says that it has arrived, and reads the others' slots once they have arrived too. Who
// has arrived for operation n + 1 is done with reading those of n; so the slots of n may be written again
// for n + 2, and no second meeting is needed. All ranks must do the same operations in the same order.

#include <sys/types.h>

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

// Not more: ranks may have to share their cores.
constexpr int64_t kAwake = 50000, kSlice = 100000000;  // nanoseconds
constexpr int kLooks = 16;

struct alignas(64) Seat {
  std::atomic<uint32_t> arrived;  // for so many operations
  std::atomic<uint32_t> num_asleep;
};

void sleep_while(std::atomic<uint32_t>& word, uint32_t value, int64_t most) {
  const timespec time{most / 1000000000, most % 1000000000};
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
#else
  if (word.load() == value) nanosleep(&time, nullptr);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// Mirrored by `Meeting` in collectives.py.
struct Meeting {
  void* region;
  int64_t slot_bytes;
  int64_t timeout;  // nanoseconds
  int32_t rank;
  int32_t num_ranks;

  Seat& seat(int32_t of) const { return static_cast<Seat*>(region)[of]; }

  // Of the operation that this rank is about to arrive for, or has just arrived for.
  uint8_t* slot(int32_t of, uint32_t operation) const {
    uint8_t* slots = static_cast<uint8_t*>(region) + num_ranks * sizeof(Seat);
    return slots + ((operation & 1) * num_ranks + of) * slot_bytes;
  }

  uint32_t next() const { return seat(rank).arrived.load(std::memory_order_relaxed) + 1; }

  // Returns 0, or 1 + a rank that did not come in time.
  int32_t arrive(uint32_t operation) const {
    Seat& own = seat(rank);
    own.arrived.store(operation);
    if (own.num_asleep.load() != 0) wake_all(own.arrived);
    int64_t started = 0;
    for (int32_t other = 0; other < num_ranks; ++other)
      if (other != rank && !await(seat(other), operation, started)) return 1 + other;
    return 0;
  }

 private:
  // Numbers wrap around; a rank is one operation ahead at most.
  static bool has_come(const Seat& seat, uint32_t operation) {
    return static_cast<int32_t>(seat.arrived.load() - operation) >= 0;
  }

  bool await(Seat& seat, uint32_t operation, int64_t& started) const {
    for (int64_t waited = 0; waited < kAwake;) {
      for (int i = 0; i < kLooks; ++i) {
        if (has_come(seat, operation)) return true;
        pause_briefly();
      }
      const int64_t now = nanoseconds();
      if (started == 0) started = now;
      waited = now - started;
    }
    // Counted before it looks for the last time: see `Waiters`.
    seat.num_asleep.fetch_add(1);
    bool came = has_come(seat, operation);
    while (!came && nanoseconds() - started < timeout) {
      sleep_while(seat.arrived, operation - 1, kSlice);
      came = has_come(seat, operation);
    }
    seat.num_asleep.fetch_sub(1);
    return came;
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

}  // namespace
}  // namespace quire

using quire::Meeting;

#pragma GCC visibility push(default)
extern "C" {

// Bytes of a region, which must be zeros at first.
int64_t quire_region_bytes(int32_t num_ranks, int64_t slot_bytes) {
  return num_ranks * (static_cast<int64_t>(sizeof(quire::Seat)) + 2 * slot_bytes);
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

}  // extern "C"
#pragma GCC visibility pop
