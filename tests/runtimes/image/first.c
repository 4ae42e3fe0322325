/* Connects with its first instruction: without a C library, the first system call is socket(), the second is
 * connect(). It also sends DNS queries. Its exit status shows where they arrived, as digits in base 3, lowest first:
 * TCP, DNS over UDP, DNS over TCP, then TCP and DNS over UDP with IPv6. Each digit is 0 (the destination answered),
 * 1 (the proxy answered) or 2 (no answer). */
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/time_types.h>
#include <sys/syscall.h>

#define AF_INET 2
#define AF_INET6 10
#define SOCK_STREAM 1
#define SOCK_DGRAM 2
#define SOL_SOCKET 1
#define SO_RCVTIMEO 20
#define SO_SNDTIMEO 21

#if defined(__x86_64__)
static long call(long number, long a, long b, long c, long d, long e) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
static long call(long number, long a, long b, long c, long d, long e) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
    return x0;
}
#endif

static const struct sockaddr_in tcp4 = {AF_INET, (8000 >> 8) | (8000 & 255) << 8, {10 | 85 << 8 | 1 << 24}, {0}};
static const struct sockaddr_in dns4 = {AF_INET, 53 << 8, {10 | 85 << 8 | 1 << 24}, {0}};
static const struct sockaddr_in6 tcp6 = {AF_INET6, (8000 >> 8) | (8000 & 255) << 8, 0, {{{0xfd, 0, 0, 0x85, [15] = 1}}}, 0};
static const struct sockaddr_in6 dns6 = {AF_INET6, 53 << 8, 0, {{{0xfd, 0, 0, 0x85, [15] = 1}}}, 0};

static int ask(int type, const void *address, long length) {
    static const struct __kernel_old_timeval limit = {3, 0};
    char answer = 0;
    long fd = call(SYS_socket, *(const unsigned short *)address, type, 0, 0, 0);
    long failed = call(SYS_connect, fd, (long)address, length, 0, 0);
    if (failed == 0) {
        call(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, (long)&limit, sizeof limit);
        call(SYS_write, fd, (long)"q", 1, 0, 0);
        call(SYS_read, fd, (long)&answer, 1, 0, 0);
    }
    call(SYS_close, fd, 0, 0, 0, 0);
    return answer == 'D' ? 0 : answer == 'P' ? 1 : 2;
}

void _start(void) {
    int status = ask(SOCK_STREAM, &tcp4, sizeof tcp4);
    status += 3 * ask(SOCK_DGRAM, &dns4, sizeof dns4);
    status += 9 * ask(SOCK_STREAM, &dns4, sizeof dns4);
    status += 27 * ask(SOCK_STREAM, &tcp6, sizeof tcp6);
    status += 81 * ask(SOCK_DGRAM, &dns6, sizeof dns6);
    for (;;) call(SYS_exit, status, 0, 0, 0, 0);
}
