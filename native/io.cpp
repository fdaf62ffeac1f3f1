// Asynchronous file input and output: a queue of blocks and a few threads that work it off with preadv and pwritev.
//
// A request is cut into blocks; neighbouring small requests are merged into one vectored call. Requests complete in any
// order; each has a number that can be waited for. Knows files by descriptor and memory by address, nothing else.

#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

constexpr int kEndOfFile = -1;    // stands for an errno where the file ended early
constexpr size_t kMaxPieces = 64;  // of one vectored call

struct Request {
  int64_t left = 0;  // bytes not yet moved
  int error = 0;     // errno, or kEndOfFile
  int64_t error_offset = 0;
  int64_t error_length = 0;
};

struct Piece {
  std::shared_ptr<Request> request;
  char *memory;
  int64_t length;
};

struct Block {
  int file;
  bool writes;
  int64_t offset;
  int64_t length = 0;
  std::vector<Piece> pieces;
};

class Engine {
 public:
  Engine(int num_threads, int64_t block_bytes, int64_t delay_us) : block_bytes_(block_bytes), delay_us_(delay_us) {
    try {
      for (int number = 0; number < num_threads; ++number) threads_.emplace_back([this, number] { work(number); });
    } catch (...) {
      end();
      throw;
    }
  }

  ~Engine() { end(); }

  void end() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      ends_ = true;
    }
    has_work_.notify_all();
    for (auto &thread : threads_) thread.join();
  }

  int64_t submit(int file, bool writes, char *memory, int64_t offset, int64_t length) {
    auto request = std::make_shared<Request>();
    request->left = length;
    std::lock_guard<std::mutex> hold(mutex_);
    const int64_t number = next_++;
    requests_[number] = request;
    int64_t num_blocks = 0;
    while (length > 0) {
      const bool joins = !queue_.empty() && queue_.back().file == file && queue_.back().writes == writes &&
                         queue_.back().offset + queue_.back().length == offset && queue_.back().length < block_bytes_ &&
                         queue_.back().pieces.size() < kMaxPieces;
      if (!joins) {
        queue_.push_back(Block{file, writes, offset, 0, {}});
        ++num_blocks;
      }
      Block &block = queue_.back();
      const int64_t part = std::min(length, block_bytes_ - block.length);
      block.pieces.push_back(Piece{request, memory, part});
      block.length += part;
      memory += part;
      offset += part;
      length -= part;
    }
    num_blocks > 1 ? has_work_.notify_all() : has_work_.notify_one();
    return number;
  }

  // 0 and the outcome, or 1 if the request is still under way after `timeout_s` (negative: no limit).
  int wait(int64_t number, double timeout_s, int *error, int64_t *error_offset, int64_t *error_length) {
    std::unique_lock<std::mutex> hold(mutex_);
    auto found = requests_.find(number);
    if (found == requests_.end()) return 2;
    auto request = found->second;
    const auto is_done = [&] { return request->left == 0; };
    if (timeout_s < 0) {
      is_finished_.wait(hold, is_done);
    } else if (!is_finished_.wait_for(hold, std::chrono::duration<double>(timeout_s), is_done)) {
      return 1;
    }
    *error = request->error;
    *error_offset = request->error_offset;
    *error_length = request->error_length;
    return 0;
  }

  void forget(int64_t number) {
    std::lock_guard<std::mutex> hold(mutex_);
    requests_.erase(number);
  }

  void drain() {
    std::unique_lock<std::mutex> hold(mutex_);
    is_finished_.wait(hold, [&] { return queue_.empty() && num_running_ == 0; });
  }

 private:
  void work(int number) {
    std::mt19937 random(number);
    for (;;) {
      Block block;
      {
        std::unique_lock<std::mutex> hold(mutex_);
        has_work_.wait(hold, [&] { return ends_ || !queue_.empty(); });
        if (queue_.empty()) return;  // ends, and everything is done
        block = std::move(queue_.front());
        queue_.pop_front();
        ++num_running_;
      }
      if (delay_us_ > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % delay_us_));
      int64_t moved = 0;
      const int error = move(block, &moved);
      {
        std::lock_guard<std::mutex> hold(mutex_);
        int64_t at = 0;
        for (auto &piece : block.pieces) {
          Request &request = *piece.request;
          const int64_t failed_at = block.offset + std::max(at, moved);
          const bool is_first = request.error == 0 || failed_at < request.error_offset;
          if (error != 0 && at + piece.length > moved && is_first) {
            request.error = error;
            request.error_offset = failed_at;
            request.error_length = at + piece.length - std::max(at, moved);
          }
          request.left -= piece.length;
          at += piece.length;
        }
        --num_running_;
      }
      is_finished_.notify_all();
    }
  }

  // Moves a whole block, however many calls that takes; returns 0, an errno, or kEndOfFile.
  static int move(const Block &block, int64_t *moved) {
    iovec parts[kMaxPieces];
    while (*moved < block.length) {
      int count = 0;
      int64_t skip = *moved;
      for (const auto &piece : block.pieces) {
        if (skip >= piece.length) {
          skip -= piece.length;
          continue;
        }
        parts[count].iov_base = piece.memory + skip;
        parts[count++].iov_len = static_cast<size_t>(piece.length - skip);
        skip = 0;
      }
      const off_t at = static_cast<off_t>(block.offset + *moved);
      const ssize_t done = block.writes ? pwritev(block.file, parts, count, at) : preadv(block.file, parts, count, at);
      if (done > 0) {
        *moved += done;
      } else if (done == 0) {
        return block.writes ? EIO : kEndOfFile;
      } else if (errno != EINTR && errno != EAGAIN) {
        return errno;
      }
    }
    return 0;
  }

  const int64_t block_bytes_;
  const int64_t delay_us_;  // tests only: the longest nap before a block
  std::mutex mutex_;
  std::condition_variable has_work_, is_finished_;
  std::deque<Block> queue_;
  std::unordered_map<int64_t, std::shared_ptr<Request>> requests_;
  std::vector<std::thread> threads_;
  int64_t next_ = 0;
  int num_running_ = 0;
  bool ends_ = false;
};

}  // namespace

extern "C" {

void *sw_io_open(int num_threads, int64_t block_bytes, int64_t delay_us) {
  try {
    return new Engine(num_threads, block_bytes, delay_us);
  } catch (...) {
    return nullptr;
  }
}

void sw_io_close(void *engine) { delete static_cast<Engine *>(engine); }

int64_t sw_io_submit(void *engine, int file, int writes, void *memory, int64_t offset, int64_t length) {
  try {
    return static_cast<Engine *>(engine)->submit(file, writes != 0, static_cast<char *>(memory), offset, length);
  } catch (...) {
    return -1;
  }
}

int sw_io_wait(void *engine, int64_t number, double timeout_s, int *error, int64_t *error_offset, int64_t *error_length) {
  return static_cast<Engine *>(engine)->wait(number, timeout_s, error, error_offset, error_length);
}

void sw_io_forget(void *engine, int64_t number) { static_cast<Engine *>(engine)->forget(number); }

void sw_io_drain(void *engine) { static_cast<Engine *>(engine)->drain(); }
}
