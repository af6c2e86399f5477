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
	for _, test := range []struct {
		env     []string
		preload string
	}{
		{nil, "/j/${LIB}/j.so"},
		{[]string{"LD_PRELOAD=", "LD_PRELOAD_NOT=x"}, "/j/${LIB}/j.so"},
		{[]string{"LD_PRELOAD=a.so b.so", "GLIBC_TUNABLES=glibc.malloc.check=3"}, "a.so b.so:/j/${LIB}/j.so"},
	} {
		expected := map[string]string{"LD_PRELOAD": test.preload, "JUMBO_ORDERS": "heap=1,maps=1"}
		if found := merged(test.env, "JUMBO_ORDERS=heap=1,maps=1"); !maps.Equal(found, expected) {
			t.Errorf("%q: %q, not %q", test.env, found, expected)
		}
	}
}
