#!/usr/bin/python3
"""The network outside of the cluster: hack/cluster.sh runs it in a network namespace of its own.

Servers: 198.51.100.20:443 answers "direct from ADDRESS" and logs each connection; 192.168.77.1:53 answers DNS queries
for Services of the cluster and for vault.example.com. Usage: outside.py KUBECONFIG KUBECTL
"""

import json
import socket
import struct
import subprocess
import sys
import threading
import time

SERVER, GATEWAY = "198.51.100.20", "192.168.77.1"
ROOT_NAMES = {"vault.example.com": SERVER}
names, asked, lock = ROOT_NAMES, 0.0, threading.Lock()


def log(*words):
    print(time.strftime("%T"), *words, flush=True)


def services():
    command = [sys.argv[2], "--kubeconfig", sys.argv[1], "get", "services", "-A", "-o", "json", "--request-timeout", "5s"]
    items = json.loads(subprocess.run(command, capture_output=True).stdout or '{"items": []}')["items"]
    return {
        "%s.%s.svc.cluster.local" % (item["metadata"]["name"], item["metadata"]["namespace"]): item["spec"]["clusterIP"]
        for item in items
        if item["spec"].get("clusterIP", "None") != "None"
    }


def address(name):
    global names, asked
    with lock:
        if name not in names and time.time() - asked > 2:
            names, asked = {**ROOT_NAMES, **services()}, time.time()
        return names.get(name)


def answer(query, client, protocol):
    labels, position = [], 12
    while query[position]:
        labels.append(query[position + 1 : position + 1 + query[position]].decode().lower())
        position += 1 + query[position]
    name, kind = ".".join(labels), struct.unpack("!H", query[position + 1 : position + 3])[0]
    found = address(name)
    log("dns", protocol, client[0], name, found)
    record = b""
    if found and kind == 1:
        record = b"\xc0\x0c\0\1\0\1\0\0\0\5\0\4" + socket.inet_aton(found)
    flags = 0x8580 if found else 0x8583
    return query[:2] + struct.pack("!HHHHH", flags, 1, 1 if record else 0, 0, 0) + query[12 : position + 5] + record


def dns_over_udp():
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((GATEWAY, 53))
    while True:
        query, client = server.recvfrom(1500)
        try:
            server.sendto(answer(query, client, "udp"), client)
        except Exception as error:
            log("dns udp", client, repr(error))


def listen(host, port, serve):
    server = socket.create_server((host, port), backlog=512)

    def loop():
        while True:
            connection, client = server.accept()
            threading.Thread(target=guarded, args=(connection, client), daemon=True).start()

    def guarded(connection, client):
        connection.settimeout(5)
        try:
            with connection:
                serve(connection, client)
        except Exception as error:
            log(host, port, client, repr(error))

    threading.Thread(target=loop, daemon=True).start()


def dns_over_tcp(connection, client):
    length = struct.unpack("!H", connection.recv(2))[0]
    reply = answer(connection.recv(length), client, "tcp")
    connection.sendall(struct.pack("!H", len(reply)) + reply)


def direct(connection, client):
    log("tcp", client[0], "connected to", SERVER)
    connection.sendall(b"direct from %s\n" % client[0].encode())


for command in (
    "link set lo up",
    "link add lan type bridge",
    "link set lan up",
    "address add 192.168.77.1/24 dev lan",
    "address add 198.51.100.20/32 dev lan",
    "route add 10.85.1.0/24 via 192.168.77.2",
    "route add 10.85.2.0/24 via 192.168.77.3",
):
    subprocess.run(["ip", *command.split()], check=True)
listen(SERVER, 443, direct)
listen(GATEWAY, 53, dns_over_tcp)
threading.Thread(target=dns_over_udp, daemon=True).start()
log("ready")
threading.Event().wait()
