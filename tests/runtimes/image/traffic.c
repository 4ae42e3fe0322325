/* The other programs of the test image, and the destination on the node:
 *   traffic pause                      waits
 *   traffic answer LETTER TCP DNS [MS] listens on these ports after MS milliseconds, and answers each byte with LETTER;
 *                                      P, the proxy, also listens on 15006 and prints the port and the original
 *                                      destination of each TCP connection
 *   traffic loop MS [SECONDS]          opens connections and sends DNS queries, and prints who answered */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void rest(double seconds) {
    struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    if (seconds > 0) nanosleep(&time, NULL);
}

static int listener(int type, const char *address, int port) {
    struct sockaddr_in6 to = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    int fd = socket(AF_INET6, type, 0), on = 1;
    inet_pton(AF_INET6, address, &to.sin6_addr);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&to, sizeof to) || (type == SOCK_STREAM && listen(fd, 1024))) {
        fprintf(stderr, "port %d: %s\n", port, strerror(errno));
        exit(1);
    }
    return fd;
}

/* The destination of a connection before its redirection; SO_ORIGINAL_DST has this number in both families. */
static void print_original(int fd, int port) {
    enum { ORIGINAL_DESTINATION = 80 };
    char text[INET6_ADDRSTRLEN];
    struct sockaddr_in to4;
    struct sockaddr_in6 to6;
    socklen_t length4 = sizeof to4, length6 = sizeof to6;
    if (getsockopt(fd, IPPROTO_IP, ORIGINAL_DESTINATION, &to4, &length4) == 0) {
        inet_ntop(AF_INET, &to4.sin_addr, text, sizeof text);
        printf("%.4f %d %s:%d\n", now(), port, text, ntohs(to4.sin_port));
    } else if (getsockopt(fd, IPPROTO_IPV6, ORIGINAL_DESTINATION, &to6, &length6) == 0) {
        inet_ntop(AF_INET6, &to6.sin6_addr, text, sizeof text);
        printf("%.4f %d [%s]:%d\n", now(), port, text, ntohs(to6.sin6_port));
    }
}

_Noreturn static void answer(char letter, int tcp, int dns) {
    enum { SIZE = 4096, LISTENERS = 5, INBOUND = 15006 };
    static struct pollfd fds[SIZE];
    int count = LISTENERS, is_proxy = letter == 'P';
    char buffer[2048];
    /* Like Istio's agent, so that an answer has the address to which the query was redirected as its source. */
    fds[0] = (struct pollfd){.fd = listener(SOCK_DGRAM, is_proxy ? "::ffff:127.0.0.1" : "::", dns), .events = POLLIN};
    fds[1] = (struct pollfd){.fd = is_proxy ? listener(SOCK_DGRAM, "::1", dns) : -1, .events = POLLIN};
    fds[2] = (struct pollfd){.fd = listener(SOCK_STREAM, "::", dns), .events = POLLIN};
    fds[3] = (struct pollfd){.fd = listener(SOCK_STREAM, "::", tcp), .events = POLLIN};
    fds[4] = (struct pollfd){.fd = is_proxy ? listener(SOCK_STREAM, "::", INBOUND) : -1, .events = POLLIN};
    printf("%.4f ready\n", now());
    for (;;) {
        if (poll(fds, count, -1) < 0) continue;
        for (int i = count - 1; i >= LISTENERS; i--) {
            if (!fds[i].revents) continue;
            if (read(fds[i].fd, buffer, sizeof buffer) > 0) {
                if (write(fds[i].fd, &letter, 1) == 1) continue;
            }
            close(fds[i].fd);
            fds[i] = fds[--count];
        }
        for (int i = 2; i < LISTENERS; i++) {
            if (!fds[i].revents) continue;
            int fd = accept(fds[i].fd, NULL, NULL);
            if (fd < 0) continue;
            if (is_proxy && i > 2) print_original(fd, i == 3 ? tcp : INBOUND);
            if (count == SIZE) close(fd);
            else fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
        }
        for (int i = 0; i < 2; i++) {
            struct sockaddr_in6 from;
            socklen_t length = sizeof from;
            if (!fds[i].revents) continue;
            if (recvfrom(fds[i].fd, buffer, sizeof buffer, 0, (struct sockaddr *)&from, &length) >= 0) {
                sendto(fds[i].fd, &letter, 1, 0, (struct sockaddr *)&from, length);
            }
        }
    }
}

static int dial(int type, int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {inet_addr("10.85.0.1")}};
    struct timeval limit = {1, 0};
    int fd = socket(AF_INET, type, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0) return fd;
    close(fd);
    return -1;
}

static char ask(int fd) {
    char letter = '-';
    if (fd >= 0 && (write(fd, "q", 1) != 1 || read(fd, &letter, 1) != 1)) letter = '-';
    return letter;
}

static char once(int type, int port) {
    int fd = dial(type, port);
    char letter = ask(fd);
    if (fd >= 0) close(fd);
    return letter;
}

/* Lines "TIME LONG TCP UDP SOCKET": who answered on a connection opened first, on a new connection, on a new DNS
 * socket, and on the DNS socket opened first. */
static int loop(double period, double seconds) {
    double start = now();
    int connection = dial(SOCK_STREAM, 8000), query = dial(SOCK_DGRAM, 53);
    while (seconds == 0 || now() < start + seconds) {
        double next = now() + period;
        char held = ask(connection), tcp = once(SOCK_STREAM, 8000), udp = once(SOCK_DGRAM, 53);
        printf("%.4f %c %c %c %c\n", now(), held, tcp, udp, ask(query));
        rest(next - now());
    }
    return 0;
}

static void end(int signal) {
    (void)signal;
    _exit(0);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    /* The first process of a PID namespace ignores signals that it does not handle. */
    signal(SIGTERM, end);
    if (argc >= 5 && !strcmp(argv[1], "answer")) {
        if (argc > 5) rest(atof(argv[5]) / 1000);
        answer(argv[2][0], atoi(argv[3]), atoi(argv[4]));
    }
    if (argc >= 3 && !strcmp(argv[1], "loop")) return loop(atof(argv[2]) / 1000, argc > 3 ? atof(argv[3]) : 0);
    if (argc == 2 && !strcmp(argv[1], "pause")) for (;;) pause();
    fprintf(stderr, "traffic: unknown command\n");
    return 2;
}
