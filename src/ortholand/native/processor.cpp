// What the processor says of itself. Asked for by processor.py, before any code for wider vectors
// than the oldest processors have is loaded; so this runs on all of them.

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

// Which registers the operating system saves when it switches between threads. Only where CPUID
// says that there is an answer (OSXSAVE): elsewhere the question ends the process.
uint32_t saved_registers() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

}  // namespace

// CPUID 1 (ECX), 7.0 (EBX), 0x80000001 (ECX), and XCR0; zero for what there is not.
extern "C" void ortholand_processor(uint32_t* registers) {
    for (int i = 0; i < 4; ++i) registers[i] = 0;
    uint32_t a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) registers[0] = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) registers[1] = b;
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) registers[2] = c;
    if (registers[0] >> 27 & 1) registers[3] = saved_registers();
}

#else

extern "C" void ortholand_processor(uint32_t* registers) {
    for (int i = 0; i < 4; ++i) registers[i] = 0;
}

#endif
