package main

import (
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"
)

// True where a seccomp filter can kill a program for madvise(2): by its default, or by an entry for it. The library could
// do nothing there.
func kills(filter *api.LinuxSeccomp) bool {
	for _, entry := range filter.GetSyscalls() {
		if isKilling(entry.GetAction()) && slices.Contains(entry.GetNames(), "madvise") {
			return true
		}
	}
	return isKilling(filter.GetDefaultAction())
}

// SCMP_ACT_KILL, _KILL_THREAD, _KILL_PROCESS; a trap is a signal that kills by default.
func isKilling(action string) bool {
	return strings.HasPrefix(action, "SCMP_ACT_KILL") || action == "SCMP_ACT_TRAP"
}
