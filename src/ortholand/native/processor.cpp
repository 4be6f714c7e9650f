// Which vectors the processor itself reports, and the operating system saves when it switches between
// threads. Asked for before any code for wider vectors than the oldest processors have is loaded: that
// would end the process (SIGILL). So this runs on all of them. Neither the name of a processor nor
// /proc/cpuinfo is enough: emulators and containers may show the host's.

extern "C" const char* ortholand_processor() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
    if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
    return "x86-64";
#else
    return "";
#endif
}
