#!/usr/bin/python3
"""A stand-in for ztunnel: speaks ZDS (istio.io/istio/pkg/zdsapi) with istio-cni's node agent, on whose socket it connects,
and starts the stand-in for the sidecar in the network namespace of each workload. Usage: ztunnel.py SOCKET SIDECAR
"""

import array
import os
import socket
import subprocess
import sys
import time

# WorkloadRequest: the tags of its messages; the first field of add and del is the workload's UID.
ADD, DELETE, SNAPSHOT, KEEP = 0x0A, 0x12, 0x1A, 0x2A
HELLO, ACK = b"\x08\x01", b"\x0a\x00"


def field(message, wanted):
    """Returns a length-delimited field of a protobuf message."""
    position = 0
    while position < len(message):
        number, length = message[position] >> 3, message[position + 1]
        size = 2
        if length & 0x80:
            length, size = (length & 0x7F) | message[position + 2] << 7, 3
        value = message[position + size : position + size + length]
        if number == wanted:
            return value
        position += size + length
    return b""


def session(workloads):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.connect(sys.argv[1])
        agent.send(HELLO)
        print("connected", flush=True)
        while True:
            request, ancillary, _, _ = agent.recvmsg(65536, socket.CMSG_SPACE(4))
            if not request:
                return
            body = field(request, request[0] >> 3)
            if request[0] == ADD:
                uid = field(body, 1).decode()
                info = field(body, 2)
                descriptors = array.array("i", ancillary[0][2][:4])
                if uid in workloads:
                    workloads.pop(uid).kill()
                netns = "/proc/%d/fd/%d" % (os.getpid(), descriptors[0])
                workloads[uid] = subprocess.Popen(["nsenter", "--net=" + netns, sys.argv[2], "15001", "15006", "15008"])
                # nsenter has opened the namespace when the program listens.
                time.sleep(0.2)
                os.close(descriptors[0])
                print("add", field(info, 2).decode(), field(info, 1).decode(), flush=True)
            elif request[0] == DELETE:
                uid = field(body, 2).decode()
                if uid in workloads:
                    workloads.pop(uid).kill()
                print("delete", uid, flush=True)
            agent.send(ACK)


running = {}
while True:
    try:
        session(running)
    except OSError as error:
        print(error, flush=True)
    time.sleep(0.3)
