package main

import (
	"maps"
	"testing"

	"github.com/containerd/nri/pkg/api"
)

// Returns what a container has after the merge.
func merged(env []string, ours ...string) map[string]string {
	adjust := &api.ContainerAdjustment{}
	merge(adjust, env, "/j/${LIB}/j.so", ours)
	found := map[string]string{}
	for _, change := range adjust.Env {
		if _, isRemoval := change.IsMarkedForRemoval(); !isRemoval {
			found[change.Key] = change.Value
		}
	}
	return found
}

func TestMergeKeepsTheImagesValues(t *testing.T) {
	const orders, tunable = "JUMBO_ORDERS=heap=1,maps=1", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
	for _, test := range []struct {
		env                []string
		preload, tunables_ string
	}{
		{nil, "/j/${LIB}/j.so", "glibc.malloc.hugetlb=1"},
		{[]string{"LD_PRELOAD=", "GLIBC_TUNABLES=", "LD_PRELOAD_NOT=x"}, "/j/${LIB}/j.so", "glibc.malloc.hugetlb=1"},
		{[]string{"LD_PRELOAD=a.so b.so", "GLIBC_TUNABLES=glibc.malloc.check=3"},
			"a.so b.so:/j/${LIB}/j.so", "glibc.malloc.check=3:glibc.malloc.hugetlb=1"},
		{[]string{"GLIBC_TUNABLES=glibc.malloc.hugetlb=0:x=1"}, "/j/${LIB}/j.so", "glibc.malloc.hugetlb=0:x=1"},
		{[]string{"GLIBC_TUNABLES=glibc.malloc.hugetlbx=0"}, "/j/${LIB}/j.so", "glibc.malloc.hugetlbx=0:glibc.malloc.hugetlb=1"},
	} {
		expected := map[string]string{
			"LD_PRELOAD": test.preload, "GLIBC_TUNABLES": test.tunables_, "JUMBO_ORDERS": "heap=1,maps=1",
		}
		if found := merged(test.env, orders, tunable); !maps.Equal(found, expected) {
			t.Errorf("%q: %q, not %q", test.env, found, expected)
		}
	}
	if found := merged([]string{"GLIBC_TUNABLES=a=1"}, orders); len(found) != 2 {
		t.Errorf("a variable that no profile has: %q", found)
	}
}
