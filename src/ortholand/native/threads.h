// Work that several threads share.

#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// run(first, last) for parts of [0, count), by up to so many threads, this one among them.
template <class Run>
void share(int64_t count, int64_t threads, Run run) {
    threads = std::max<int64_t>(1, std::min(threads, count));
    std::vector<std::thread> helpers;
    helpers.reserve(threads - 1);
    int64_t mine = count;  // what is from here on is the helpers'
    for (int64_t t = threads - 1; t > 0; --t) {
        const int64_t first = count * t / threads;
        try {
            helpers.emplace_back(run, first, mine);
        } catch (const std::system_error&) {
            break;  // no thread to be had: this one does the rest
        }
        mine = first;
    }
    run(int64_t(0), mine);
    for (std::thread& helper : helpers) helper.join();
}

}  // namespace
