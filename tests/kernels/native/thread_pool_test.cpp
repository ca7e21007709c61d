#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"
#include "contention.h"
#include "phase.h"
#include "thread_pool.h"

namespace check {
namespace {

constexpr int kItems = 40;

// Two phases, of which the second needs all of the first. Plain numbers, so that the thread sanitizer
// sees who touches them when.
struct Sum {
  int64_t numbers[kItems], sums[kItems];
  std::atomic<int> num_bodies{0}, num_inside{0};
  int late_item;
  quire::Phase filling{kItems, 3}, adding{kItems, 1};
};

void add_up(void* data) {
  Sum& sum = *static_cast<Sum*>(data);
  ++sum.num_bodies;
  ++sum.num_inside;
  sum.filling.run([&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) sum.numbers[i] = i;
  });
  sum.filling.wait();
  sum.adding.run([&](int64_t item, int64_t) {
    if (item == sum.late_item) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    sum.sums[item] = 0;
    for (const int64_t number : sum.numbers) sum.sums[item] += number * item;
  });
  --sum.num_inside;
}

void run_sums(quire::ThreadPool& pool, int count) {
  for (int i = 0; i < count; ++i) {
    Sum sum;
    sum.late_item = i % 16 == 0 ? i % kItems : -1;
    pool.run(add_up, &sum, num_threads);
    equal("threads still at work", sum.num_inside, 0);
    equal("too many threads", sum.num_bodies > num_threads, 0);
    for (int item = 0; item < kItems; ++item)
      equal("a sum", sum.sums[item], item * kItems * (kItems - 1) / 2);
  }
}

}  // namespace

void test_thread_pool() {
  static quire::ThreadPool pool;  // its threads never end
  run_sums(pool, 100);
  std::thread other(run_sums, std::ref(pool), 50);
  run_sums(pool, 50);
  other.join();
}

void test_contention() {
  constexpr int64_t kWorked = 50000, kLate = 5000000, kSecond = 1000000000;
  quire::Contention contention;
  int64_t now = kSecond;
  contention.note(20000, kWorked, 7, 7, now);
  contention.note(kLate, 2 * kLate, 7, 7, now);
  equal("helpers when none was late", contention.allow(7, now), 7);

  int64_t last_interval = 0;
  for (int i = 0; i < 5; ++i) {
    contention.note(kLate, kWorked, 7, 7, now);
    equal("helpers after one was late", contention.allow(7, now), 6);
    const int64_t left_out_at = now;
    while (contention.allow(7, now) < 7) now += 1000;
    equal("a longer interval", now - left_out_at > last_interval, 1);
    last_interval = now - left_out_at;
  }
  contention.note(kLate, kWorked, 7, 7, now);
  contention.note(kLate, kWorked, 6, 7, now);
  equal("helpers after two were late", contention.allow(7, now), 5);
  equal("helpers of a smaller job", contention.allow(1, now), 0);

  for (int i = 0; i < 3; ++i) equal("helpers again", contention.allow(7, now += kSecond), i == 0 ? 6 : 7);
  contention.note(kLate, kWorked, 7, 7, now);
  equal("the interval after a calm while", contention.allow(7, now + last_interval / 8), 7);
}

}  // namespace check
