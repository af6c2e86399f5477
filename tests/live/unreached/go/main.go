// A heap of small objects that change while the collector runs, beside threads in system calls that
// a stop of a thread could end early.
//
//	usage: heap MIB STEPS
//
// Prints as JSON: the seconds of the fill and of the work, the share of anonymous memory on huge
// pages after each, the collections, and the numbers of waits, of EINTR results and of early ends.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// 256 bytes: a size class of the runtime.
type node struct {
	next *node
	key  uint64
	data [240]byte
}

type result struct {
	Fill      float64 `json:"fill_seconds"`
	Work      float64 `json:"work_seconds"`
	Filled    float64 `json:"huge_share_filled"`
	Worked    float64 `json:"huge_share_worked"`
	MiB       float64 `json:"anonymous_mib"`
	Collected uint32  `json:"collections"`
	Waits     int64   `json:"waits"`
	EINTR     int64   `json:"eintr"`
	Early     int64   `json:"early"`
	Sum       uint64  `json:"sum"`
}

var waits, interrupted, early atomic.Int64

const pause = 20 * time.Millisecond

// Waits for the pause repeatedly by `call`, which returns an errno.
func wait(timed bool, call func() syscall.Errno) {
	// Without the runtime's preemption signal, which interrupts calls by itself.
	runtime.LockOSThread()
	urgent := uint64(1) << (syscall.SIGURG - 1)
	const block, size = 0, 8
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, block, uintptr(unsafe.Pointer(&urgent)), 0, size, 0, 0)
	for {
		start := time.Now()
		errno := call()
		waits.Add(1)
		if errno == syscall.EINTR {
			interrupted.Add(1)
		} else if timed && time.Since(start) < pause-time.Millisecond {
			early.Add(1)
		}
	}
}

func startWaits() {
	epoll, _ := syscall.EpollCreate1(0)
	go wait(true, func() syscall.Errno {
		var event syscall.EpollEvent
		_, _, errno := syscall.Syscall6(syscall.SYS_EPOLL_WAIT, uintptr(epoll), uintptr(unsafe.Pointer(&event)), 1,
			uintptr(pause.Milliseconds()), 0, 0)
		return errno
	})
	go wait(true, func() syscall.Errno {
		time := syscall.NsecToTimespec(int64(pause))
		_, _, errno := syscall.Syscall(syscall.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&time)), 0, 0)
		return errno
	})
	word := new(uint32)
	go wait(true, func() syscall.Errno {
		time := syscall.NsecToTimespec(int64(pause))
		_, _, errno := syscall.Syscall6(syscall.SYS_FUTEX, uintptr(unsafe.Pointer(word)), 0, 0,
			uintptr(unsafe.Pointer(&time)), 0, 0)
		return errno
	})
	var ends [2]int
	if err := syscall.Pipe(ends[:]); err != nil {
		panic(err)
	}
	go func() {
		for {
			time.Sleep(pause)
			syscall.Write(ends[1], []byte{1})
		}
	}()
	go wait(false, func() syscall.Errno {
		var byte [1]byte
		_, _, errno := syscall.Syscall(syscall.SYS_READ, uintptr(ends[0]), uintptr(unsafe.Pointer(&byte)), 1)
		return errno
	})
}

func memory() (share, mib float64) {
	text, err := os.ReadFile("/proc/self/smaps_rollup")
	if err != nil {
		panic(err)
	}
	value := func(name string) float64 {
		for _, line := range strings.Split(string(text), "\n") {
			if strings.HasPrefix(line, name+":") {
				number, _ := strconv.ParseFloat(strings.Fields(line)[1], 64)
				return number
			}
		}
		return 0
	}
	all := value("Anonymous")
	return value("AnonHugePages") / all, all / 1024
}

func main() {
	mib, _ := strconv.Atoi(os.Args[1])
	steps, _ := strconv.Atoi(os.Args[2])
	var out result
	startWaits()
	start := time.Now()
	nodes := make([]*node, mib<<20/256)
	for at := range nodes {
		nodes[at] = &node{key: uint64(at)}
		if at > 0 {
			nodes[at].next = nodes[at/2]
		}
	}
	out.Fill = time.Since(start).Seconds()
	out.Filled, _ = memory()
	start = time.Now()
	random := uint64(88172645463325252)
	for step := range steps {
		random ^= random << 13
		random ^= random >> 7
		random ^= random << 17
		at := random % uint64(len(nodes))
		out.Sum += nodes[at].key + nodes[at].next.orSelf().key
		if step%8 == 0 && at > 0 {
			nodes[at] = &node{key: nodes[at].key + 1, next: nodes[at/2]}
		}
	}
	out.Work = time.Since(start).Seconds()
	out.Worked, out.MiB = memory()
	var statistics runtime.MemStats
	runtime.ReadMemStats(&statistics)
	out.Collected = statistics.NumGC
	out.Waits, out.EINTR, out.Early = waits.Load(), interrupted.Load(), early.Load()
	text, _ := json.Marshal(out)
	fmt.Println(string(text))
}

func (it *node) orSelf() *node {
	if it == nil {
		return &node{}
	}
	return it
}
