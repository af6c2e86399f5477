package main

import (
	"testing"

	"github.com/containerd/nri/pkg/api"
)

func TestFiltersThatKill(t *testing.T) {
	filter := func(byDefault string, actions ...string) *api.LinuxSeccomp {
		filter := &api.LinuxSeccomp{DefaultAction: byDefault}
		for _, action := range actions {
			entry := &api.LinuxSyscall{Names: []string{"mmap", "madvise"}, Action: action}
			filter.Syscalls = append(filter.Syscalls, entry)
		}
		return filter
	}
	for _, test := range []struct {
		filter *api.LinuxSeccomp
		kills  bool
	}{
		{nil, false},
		{filter("SCMP_ACT_ERRNO", "SCMP_ACT_ALLOW"), false},
		{filter("SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"), false},
		{filter("SCMP_ACT_LOG"), false},
		{filter("SCMP_ACT_KILL"), true},
		{filter("SCMP_ACT_KILL_PROCESS", "SCMP_ACT_ALLOW"), true},
		{filter("SCMP_ACT_TRAP"), true},
		{filter("SCMP_ACT_ALLOW", "SCMP_ACT_ALLOW", "SCMP_ACT_KILL_THREAD"), true},
		{&api.LinuxSeccomp{Syscalls: []*api.LinuxSyscall{{Names: []string{"bpf"}, Action: "SCMP_ACT_KILL"}}}, false},
	} {
		if found := kills(test.filter); found != test.kills {
			t.Errorf("%v: %v", test.filter, found)
		}
	}
}
