// Ranks are threads here, which share the region as processes would: the thread sanitizer sees whether
// what one writes is published to the others.

#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>

#include "check.h"
#include "half.h"

extern "C" {
struct Meeting {
  void* region;
  int64_t slot_bytes, timeout;
  int32_t rank, num_ranks;
};
struct Ring {
  void* region;
  int64_t capacity, timeout;
};
int64_t quire_region_bytes(int32_t num_ranks, int64_t slot_bytes);
int32_t quire_all_reduce(const Meeting*, void* x, int64_t count, int32_t dtype);
int32_t quire_all_gather(const Meeting*, const void* x, void* out, int64_t num_bytes);
int32_t quire_broadcast(const Meeting*, void* x, int64_t num_bytes, int32_t source);
int64_t quire_ring_bytes(int64_t capacity);
int32_t quire_send(const Ring*, const void* x, int64_t num_bytes);
int32_t quire_receive(const Ring*, void* out, int64_t num_bytes);
void quire_publish(int64_t* at, int64_t value);
int64_t quire_watch(const int64_t* at, int64_t seen, int64_t awake);
}

namespace check {
namespace {

constexpr int64_t kSecond = 1000000000, kLong = 100 * kSecond, kShort = kSecond / 500;
constexpr int64_t kSlot = 128;
constexpr int64_t kCounts[] = {0, 1, 7, 32, 33, 64, 65, 200};
enum { kDone, kTimedOut, kOtherSize };

// Zeros at an address as that of a page, in which the counters lie as they would in a file.
class Region {
 public:
  explicit Region(int64_t size) : data_(size + 64) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(data_.data());
    start_ = data_.data() + (64 - address % 64) % 64;
  }
  void* start() { return start_; }

 private:
  std::vector<uint8_t> data_;
  uint8_t* start_;
};

void run_ranks(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> others;
  for (int rank = 1; rank < count; ++rank) others.emplace_back(work, rank);
  work(0);
  for (std::thread& other : others) other.join();
}

struct Group {
  explicit Group(int64_t timeout) : region(quire_region_bytes(num_threads, kSlot)) {
    for (int rank = 0; rank < num_threads; ++rank)
      members.push_back({region.start(), kSlot, timeout, rank, num_threads});
  }
  Region region;
  std::vector<Meeting> members;
};

uint16_t float_to_bfloat16(float value) {  // of small whole numbers
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

// Whole numbers, of which sums are exact in all three types.
float number(int rank, int64_t i) { return static_cast<float>((rank * 7 + i * 3) % 11 - 5); }

float total(int64_t i) {
  float sum = 0;
  for (int rank = 0; rank < num_threads; ++rank) sum += number(rank, i);
  return sum;
}

void reduce(const Meeting& member, int64_t count) {
  Floats x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = number(member.rank, i);
  equal("all-reduce", quire_all_reduce(&member, x.data(), count, 0), 0);
  for (int64_t i = 0; i < count; ++i) equal("a sum", x[i], total(i));
  for (const int32_t dtype : {1, 2}) {
    const auto narrow = dtype == 1 ? float_to_bfloat16 : quire::float_to_half;
    std::vector<uint16_t> halves(count);
    for (int64_t i = 0; i < count; ++i) halves[i] = narrow(number(member.rank, i));
    equal("all-reduce", quire_all_reduce(&member, halves.data(), count, dtype), 0);
    for (int64_t i = 0; i < count; ++i) equal("a sum of halves", halves[i], narrow(total(i)));
  }
}

void gather(const Meeting& member, int64_t count) {
  const int size = member.num_ranks;
  std::vector<uint8_t> x(count), all(count * size);
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<uint8_t>(member.rank * 31 + i);
  equal("all-gather", quire_all_gather(&member, x.data(), all.data(), count), 0);
  for (int64_t i = 0; i < count * size; ++i)
    equal("a gathered byte", all[i], static_cast<uint8_t>(i / count * 31 + i % count));
}

void broadcast(const Meeting& member, int64_t count, int source) {
  std::vector<uint8_t> x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<uint8_t>(member.rank * 31 + i);
  equal("broadcast", quire_broadcast(&member, x.data(), count, source), 0);
  for (int64_t i = 0; i < count; ++i) equal("a byte", x[i], static_cast<uint8_t>(source * 31 + i));
}

// In float32, and only then rounded: 1024 and many halves of its last place.
void round_once(const Meeting& member) {
  uint16_t x = quire::float_to_half(member.rank == 0 ? 1024.0f : 0.5f);
  equal("all-reduce", quire_all_reduce(&member, &x, 1, 2), 0);
  const float sum = 1024.0f + 0.5f * static_cast<float>(member.num_ranks - 1);
  equal("a sum that is rounded once", x, quire::float_to_half(sum));
  x = member.rank == 0 ? 0x7f80 : 0xff80;  // infinities of bfloat16
  equal("all-reduce", quire_all_reduce(&member, &x, 1, 1), 0);
  equal("infinity less infinity", x, member.num_ranks == 1 ? 0x7f80 : 0x7fc0);
}

}  // namespace

void test_collectives() {
  Group group(kLong);
  run_ranks(num_threads, [&](int rank) {
    const Meeting& member = group.members[rank];
    for (const int64_t count : kCounts) {
      reduce(member, count);
      gather(member, count);
      for (int source = 0; source < num_threads; ++source) broadcast(member, count, source);
    }
    round_once(member);
  });
}

// Numbers of operations wrap around. Then ranks come one by one, and name one that is not there.
void test_missing_rank() {
  Group group(kLong);
  const uint32_t almost = std::numeric_limits<uint32_t>::max() - 1;
  for (int rank = 0; rank < num_threads; ++rank)
    std::memcpy(static_cast<uint8_t*>(group.region.start()) + 64 * rank, &almost, sizeof almost);
  run_ranks(num_threads, [&](int rank) {
    for (int i = 0; i < 4; ++i) reduce(group.members[rank], 7);
  });
  for (Meeting& member : group.members) member.timeout = kShort;
  const Meeting &first = group.members[0], &last = group.members[num_threads - 1];
  float x = 1;
  const int missing = num_threads == 1 ? 0 : 2;
  for (int i = 0; i < 2; ++i)
    equal("the missing rank", quire_all_reduce(&first, &x, 1, 0), missing);
  if (num_threads > 2) {
    equal("the missing rank", quire_all_gather(&last, &x, &x, 0), 0);
    equal("the missing rank", quire_broadcast(&last, &x, sizeof x, 0), missing);
  }
}

void test_ring() {
  constexpr int64_t kCapacity = 64;
  constexpr int kMessages = 40;
  Region region(quire_ring_bytes(kCapacity));
  const uint32_t almost = std::numeric_limits<uint32_t>::max() - 99;  // positions wrap around
  for (int end = 0; end < 2; ++end)
    std::memcpy(static_cast<uint8_t*>(region.start()) + 64 * end, &almost, sizeof almost);
  const Ring ring{region.start(), kCapacity, kLong}, hasty{region.start(), kCapacity, kShort};
  std::thread sender([&] {
    for (int message = 0; message < kMessages; ++message) {
      std::vector<uint8_t> x(message * 5);
      for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint8_t>(message + i);
      equal("send", quire_send(&ring, x.data(), x.size()), kDone);
    }
  });
  for (int message = 0; message < kMessages; ++message) {
    if (message % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    std::vector<uint8_t> out(message * 5);
    equal("receive", quire_receive(&ring, out.data(), out.size()), kDone);
    for (size_t i = 0; i < out.size(); ++i) equal("a byte", out[i], static_cast<uint8_t>(message + i));
  }
  sender.join();

  std::vector<uint8_t> x(kCapacity);
  equal("receive from a silent sender", quire_receive(&hasty, x.data(), 1), kTimedOut);
  equal("send what fits", quire_send(&hasty, x.data(), 24), kDone);
  equal("receive another size", quire_receive(&hasty, x.data(), 23), kOtherSize);
  equal("send to a silent receiver", quire_send(&hasty, x.data(), kCapacity), kTimedOut);
}

void test_published_number() {
  constexpr int64_t kCount = 200;
  int64_t number = 0;
  std::vector<int64_t> written(kCount + 1);
  std::thread writer([&] {
    for (int64_t i = 1; i <= kCount; ++i) {
      written[i] = 3 * i;
      quire_publish(&number, i);
      if (i % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  for (int64_t seen = 0, now; seen < kCount; seen = now) {
    now = quire_watch(&number, seen, kShort);
    equal("an older number", now < seen, false);
    equal("what was written before", written[now], 3 * now);
  }
  writer.join();
  equal("a number that stays", quire_watch(&number, kCount, kShort), kCount);
}

}  // namespace check
