"""Holds the mmap lock: one page fault waits for a file system in user space that does not answer.

    held.py FOLDER

Mounts the file system, and prints `ready SERVER` with the process ID of its server, then `held`
once the page fault waits. Prints `none` where there is no FUSE. The end of the server ends the wait.
"""

import ctypes
import mmap
import os
import struct
import sys
import threading

LOOKUP, FORGET, GETATTR, OPEN, READ, INIT, OPENDIR, BATCH_FORGET = 1, 2, 3, 14, 15, 26, 27, 42
# The kernel reads ahead, then once without the lock, then with it.
READS_WITHOUT_LOCK = 2
PR_SET_PDEATHSIG, SIGKILL = 1, 9
libc = ctypes.CDLL(None, use_errno=True)


def attributes(node):
    mode, size = (0o40755, 0) if node == 1 else (0o100644, 4096)
    return struct.pack("6Q10I", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def serve(device):
    reads = 0
    while True:
        request = os.read(device, 1 << 18)
        _, code, unique, node = struct.unpack_from("IIQQ", request)
        error, body = 0, b""
        if code == INIT:
            body = struct.pack("4I2HI", 7, 31, 1 << 16, 0, 8, 8, 1 << 16) + struct.pack("I", 1) + bytes(32)
        elif code == LOOKUP:
            body = struct.pack("4Q2I", 2, 0, 0, 0, 0, 0) + attributes(2)
        elif code == GETATTR:
            body = struct.pack("QII", 0, 0, 0) + attributes(node)
        elif code in (OPEN, OPENDIR):
            body = struct.pack("QII", 1, 0, 0)
        elif code == READ:
            reads += 1
            if reads > READS_WITHOUT_LOCK:
                print("held", flush=True)
                continue
            error = -5
        elif code in (FORGET, BATCH_FORGET):
            continue
        else:
            error = -38
        os.write(device, struct.pack("IiQ", 16 + len(body), error, unique) + body)


folder = sys.argv[1]
try:
    device = os.open("/dev/fuse", os.O_RDWR)
except OSError:
    print("none", flush=True)
    sys.exit()
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % device
if libc.mount(b"held", folder.encode(), b"fuse", 0, options):
    print("none", flush=True)
    sys.exit()
server = os.fork()
if server == 0:
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL)
    serve(device)
os.close(device)
kept = bytes(32 << 20).replace(b"\0", b"x")
file = os.open(folder + "/file", os.O_RDONLY)
page = mmap.mmap(file, 4096, prot=mmap.PROT_READ)
print("ready", server, flush=True)
page[0]
