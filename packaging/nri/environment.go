package main

import (
	"strings"

	"github.com/containerd/nri/pkg/api"
)

// Returns the value of a variable.
func variable(env []string, name string) (string, bool) {
	for _, entry := range env {
		if value, ok := strings.CutPrefix(entry, name+"="); ok {
			return value, true
		}
	}
	return "", false
}

// Sets the variables of jumbo beside those of env, which has the image's, the pod's, and those of earlier plugins.
//
// Each variable is removed first: else the runtime fails a container for which an earlier plugin has set it.
func merge(adjust *api.ContainerAdjustment, env []string, entry string, ours []string) {
	set := func(name, value string) {
		adjust.RemoveEnv(name)
		adjust.AddEnv(name, value)
	}
	// Last, so that an allocator of the image stays in front.
	theirs, _ := variable(env, "LD_PRELOAD")
	set("LD_PRELOAD", join(theirs, entry))
	for _, added := range ours {
		name, value, _ := strings.Cut(added, "=")
		set(name, value)
	}
}

func join(theirs, ours string) string {
	if theirs == "" {
		return ours
	}
	return theirs + ":" + ours
}
