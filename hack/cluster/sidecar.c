/* A stand-in for the sidecar, in the image "tools" of hack/cluster.sh: listens on the TCP ports of its arguments, and
 * answers "sidecar PORT for ORIGINAL-DESTINATION". On UDP port 15053 it answers each DNS query with 192.0.2.53. */
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SIZE = 16, DNS = 15053, ORIGINAL_DESTINATION = 80 };

static int listener(int type, int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, type, 0), on = 1;
    /* As Istio's agent: the answer must have the address to which the query was redirected as its source. */
    if (type == SOCK_DGRAM) to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&to, sizeof to) || (type == SOCK_STREAM && listen(fd, 64))) {
        perror("bind");
        exit(1);
    }
    return fd;
}

static void answer_connection(int listening) {
    struct sockaddr_in local, original;
    struct timeval limit = {0, 200000};
    socklen_t length = sizeof local;
    char text[128], address[INET_ADDRSTRLEN];
    int fd = accept(listening, NULL, NULL);
    if (fd < 0) return;
    getsockname(fd, (struct sockaddr *)&local, &length);
    length = sizeof original;
    if (getsockopt(fd, IPPROTO_IP, ORIGINAL_DESTINATION, &original, &length)) original = local;
    inet_ntop(AF_INET, &original.sin_addr, address, sizeof address);
    snprintf(text, sizeof text, "sidecar %d for %s:%d\n", ntohs(local.sin_port), address, ntohs(original.sin_port));
    fputs(text, stdout);
    if (write(fd, text, strlen(text)) > 0) shutdown(fd, SHUT_WR);
    /* Without this, data that was not read would reset the connection before the client reads the answer. */
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    while (read(fd, text, sizeof text) > 0);
    close(fd);
}

static void answer_query(int fd) {
    static const unsigned char record[] = {0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 192, 0, 2, 53};
    unsigned char message[1500];
    struct sockaddr_in from;
    socklen_t length = sizeof from;
    ssize_t size = recvfrom(fd, message, sizeof message - sizeof record, 0, (struct sockaddr *)&from, &length);
    if (size < 17) return;
    /* Flags: a response without error. One answer, if the query is of type A; nothing after the question. */
    int is_a = 0, end = 12;
    while (end < size && message[end]) end += message[end] + 1;
    if ((end += 5) > size) return;
    is_a = message[end - 3] == 1;
    memcpy(message + 2, (unsigned char[]){0x81, 0x80, 0, 1, 0, is_a, 0, 0, 0, 0}, 10);
    memcpy(message + end, record, sizeof record);
    printf("sidecar %d: DNS query\n", DNS);
    sendto(fd, message, end + (is_a ? sizeof record : 0), 0, (struct sockaddr *)&from, length);
}

int main(int argc, char **argv) {
    struct pollfd fds[SIZE] = {{.fd = listener(SOCK_DGRAM, DNS), .events = POLLIN}};
    int count = 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 1; i < argc && count < SIZE; i++) {
        fds[count++] = (struct pollfd){.fd = listener(SOCK_STREAM, atoi(argv[i])), .events = POLLIN};
    }
    for (;;) {
        if (poll(fds, count, -1) < 0) continue;
        if (fds[0].revents) answer_query(fds[0].fd);
        for (int i = 1; i < count; i++) {
            if (fds[i].revents) answer_connection(fds[i].fd);
        }
    }
}
