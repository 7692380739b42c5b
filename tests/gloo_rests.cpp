// An epoll_wait, preloaded into the processes that tests start, that rests after a few returns in a
// row without a wait.
//
// gloo's thread skips a connection whose lock another thread holds, and its epoll_wait returns at
// once for as long as there is something to read. With more ranks than cores the lock's holder may
// wait for the very core that this thread turns on: it was half of the time of tests on ranks.

#include <dlfcn.h>
#include <sys/epoll.h>

#include <ctime>

namespace {

using EpollWait = int (*)(int, epoll_event*, int, int);

constexpr int kMostInARow = 8;           // returns without a wait, before it rests
constexpr timespec kRest = {0, 50'000};  // 50 us: a writev under gloo's lock takes some 20

EpollWait original() {
  static const auto found = reinterpret_cast<EpollWait>(dlsym(RTLD_NEXT, "epoll_wait"));
  return found;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int epoll_wait(int epoll, epoll_event* events,
                                                                 int max_events, int timeout_ms) {
  thread_local int in_a_row = 0;
  const int count = original()(epoll, events, max_events, 0);
  if (count == 0) {
    in_a_row = 0;
    return timeout_ms == 0 ? 0 : original()(epoll, events, max_events, timeout_ms);
  }
  if (count < 0) return count;
  if (++in_a_row == kMostInARow) {
    in_a_row = 0;
    nanosleep(&kRest, nullptr);
  }
  return count;
}
