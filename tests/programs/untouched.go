// A Go program: statically linked, with the heap of its runtime.
package main

import (
	"fmt"
	"os"
	"runtime"
)

type node struct {
	next *node
	data [100]uint64
}

func main() {
	var list *node
	for i := uint64(0); i < 100_000; i++ {
		list = &node{next: list}
		list.data[i%100] = i
	}
	big := make([]byte, 64<<20)
	for i := range big {
		big[i] = byte(i)
	}
	runtime.GC()
	sum := uint64(0)
	for n := list; n != nil; n = n.next {
		for _, v := range n.data {
			sum += v
		}
	}
	fmt.Println("sum", sum, big[12345])
	fmt.Fprintln(os.Stderr, "go says this on stderr")
	os.Exit(5)
}
