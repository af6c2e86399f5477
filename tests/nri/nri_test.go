// Package nri tests packaging/nri under a real containerd, which tests/nri/run starts.
package nri

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

var requested = map[string]string{"jumbo.dev/memory": "default"}

// Output lines of check.py.
type found struct {
	Huge      int
	Libraries []string
	Env       map[string]string
}

// Fills a heap of CPython in a container of a new pod.
func (n *node) heap(name, image string, annotations map[string]string, changed func(*cri.ContainerConfig)) found {
	n.Helper()
	pod := n.pod(name, annotations)
	defer n.delete(pod.id)
	return pod.heap("main", image, changed)
}

func (p pod) heap(name, image string, changed func(*cri.ContainerConfig)) found {
	p.Helper()
	text := p.output(name, image, changed, "python3", "/opt/check.py")
	lines := strings.Split(text, "\n")
	huge, err := strconv.Atoi(lines[0])
	if err != nil || len(lines) < 2 {
		p.Fatalf("%v: %s", err, text)
	}
	found := found{huge, strings.Fields(lines[1]), map[string]string{}}
	for _, line := range lines[2:] {
		name, value, _ := strings.Cut(line, "=")
		found.Env[name] = value
	}
	p.Logf("%s/%s: %d %% huge", p.config.Metadata.Name, name, found.Huge)
	return found
}

func (n *node) covered(found found) {
	n.Helper()
	if found.Huge < 90 || !slices.Contains(found.Libraries, "libjumbo_preload.so") {
		n.Errorf("not covered: %+v", found)
	}
}

func (n *node) plain(found found) {
	n.Helper()
	if found.Huge > 10 || slices.Contains(found.Libraries, "libjumbo_preload.so") || found.Env["JUMBO_ORDERS"] != "" {
		n.Errorf("not plain: %+v", found)
	}
}

func (n *node) says(words ...string) {
	n.Helper()
	for line := range strings.Lines(n.said()) {
		if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
			return
		}
	}
	n.Errorf("no line of the plugin has %q", words)
}

func TestPods(t *testing.T) {
	n := newNode(t)
	n.plain(n.heap("no-plugin", "python", requested, nil))
	n.startPlugin()

	n.part("glibc: huge, and the image's variables stay", func(n *node) {
		found := n.heap("glibc", "python", requested, nil)
		n.covered(found)
		if !slices.Contains(found.Libraries, "own.so") || !strings.HasPrefix(found.Env["LD_PRELOAD"], "/opt/own.so:/usr/lib/jumbo/") {
			n.Errorf("the image's library is gone: %+v", found)
		}
		if found.Env["GLIBC_TUNABLES"] != "glibc.pthread.mutex_spin_count=4" {
			n.Errorf("the image's tunable is gone: %+v", found)
		}
	})
	n.part("an image with /etc/ld.so.preload keeps it", func(n *node) {
		found := n.heap("preloads", "preloads", requested, nil)
		n.covered(found)
		if !slices.Equal(found.Libraries, []string{"libjumbo_preload.so", "listed.so", "own.so"}) {
			n.Errorf("a library of the image is gone: %+v", found)
		}
	})
	n.part("without the annotation, or with off: plain", func(n *node) {
		n.plain(n.heap("none", "python", nil, nil))
		n.plain(n.heap("off", "python", map[string]string{"jumbo.dev/memory": "off"}, nil))
		n.plain(n.heap("variable", "python", requested, func(c *cri.ContainerConfig) {
			c.Envs = []*cri.KeyValue{{Key: "JUMBO", Value: "off"}}
		}))
		n.says("test/variable/main starts plain", "JUMBO=off")
	})
	n.part("by container", func(n *node) {
		pod := n.pod("two", map[string]string{"memory.jumbo.dev/container.a": "node"})
		defer n.delete(pod.id)
		n.covered(pod.heap("a", "python", nil))
		n.plain(pod.heap("b", "python", nil))
	})
	n.part("read-only, another user, no capabilities, no new privileges", func(n *node) {
		n.covered(n.heap("hardened", "python", requested, func(c *cri.ContainerConfig) {
			context := c.Linux.SecurityContext
			context.ReadonlyRootfs, context.NoNewPrivs = true, true
			context.RunAsUser = &cri.Int64Value{Value: 1000}
			context.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}}
			context.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
		}))
	})
	n.part("musl and static programs: untouched", func(n *node) {
		for _, command := range [][]string{{"/huge", "mapped"}, {"/static", "mapped"}, {"/busybox", "grep", "AnonHuge", "/proc/self/smaps_rollup"}} {
			run := func(name string, annotations map[string]string) string {
				pod := n.pod(name, annotations)
				defer n.delete(pod.id)
				return pod.output("main", "musl", nil, command...)
			}
			base := filepath.Base(command[0])
			plain, with := run("plain-"+base, nil), run("with-"+base, requested)
			n.Logf("%v: %q", command, with)
			if plain != with {
				n.Errorf("%v: %q and not %q", command, with, plain)
			}
		}
		n.says("test/with-huge/main: covered")
	})
	n.part("an unknown profile", func(n *node) {
		n.covered(n.heap("unknown", "python", map[string]string{"jumbo.dev/memory": "no\nsuch"}, nil))
		n.says("test/unknown/main: no profile", "takes its place")
	})
	for i, share := range []string{"x", "-1", "101", ""} {
		n.part(fmt.Sprintf("arms of %q are refused", share), func(n *node) {
			name := fmt.Sprintf("bad-%d", i)
			n.plain(n.heap(name, "python", map[string]string{"jumbo.dev/memory": "default", "jumbo.dev/ab": share}, nil))
			n.says("test/"+name+"/main starts plain", "jumbo.dev/ab")
		})
	}
	n.part("arms, over a restart of the plugin", arms)
	n.part("without the specification: plain", func(n *node) {
		n.command(os.Getenv("JUMBO"), "cdi", "remove")
		n.plain(n.heap("removed", "python", requested, nil))
		n.says("test/removed/main starts plain", "hint:")
		n.generate()
		n.covered(n.heap("again", "python", requested, nil))
	})
	n.part("containerd restarted: the plugin registers again", func(n *node) {
		n.end(&n.containerd, syscall.SIGTERM)
		n.startRuntime()
		n.registered()
		n.covered(n.heap("restarted", "python", requested, nil))
		n.end(&n.containerd, syscall.SIGKILL)
		n.startRuntime()
		n.registered()
		n.covered(n.heap("killed", "python", requested, nil))
	})
	n.part("plugin killed: plain", func(n *node) {
		n.end(&n.plugin, syscall.SIGKILL)
		n.plain(n.heap("killed-plugin", "python", requested, nil))
	})
	n.part("the containers of the DaemonSet", daemonSet)
}

// Six pods of one owner, of which the plugin sees three before its restart.
func arms(n *node) {
	annotations := map[string]string{"jumbo.dev/memory": "default", "jumbo.dev/ab": "50"}
	count := map[string]int{}
	for i := range 6 {
		if i == 3 {
			n.end(&n.plugin, syscall.SIGKILL)
			n.startPlugin()
		}
		pod := n.pod(fmt.Sprintf("web-5d9c7b-%d", i), annotations)
		defer n.delete(pod.id)
		// Like an init container.
		first := pod.output("init", "python", nil, "python3", "-c",
			"import os; print(os.environ['JUMBO_ARM'], 'libjumbo' in open('/proc/self/maps').read())")
		id := pod.start("main", "python", nil, "sleep", "3600")
		arm := n.arm(id)
		if first != map[string]string{"covered": "covered True\n", "plain": "plain False\n"}[arm] {
			n.Errorf("the containers of %s are in arms %q and %q", pod.config.Metadata.Name, first, arm)
		}
		count[arm]++
		n.Logf("%s: %s", pod.config.Metadata.Name, arm)
		if covered := 2 * count["covered"]; covered < i || covered > i+2 {
			n.Errorf("of %d pods %d are covered", i+1, count["covered"])
		}
	}
	if count["covered"] != 3 || count["plain"] != 3 {
		n.Errorf("arms: %v", count)
	}
	n.until("the metric has all pods", func() bool {
		text, _ := os.ReadFile(n.path("arms.prom"))
		return strings.Count(string(text), `arm="covered"`) == 3 && strings.Count(string(text), `arm="plain"`) == 3
	})
}

// Reads the arm from the annotation of a container.
func (n *node) arm(id string) string {
	answer, err := n.runtime.ContainerStatus(context.Background(), &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		n.Fatal(err)
	}
	var info struct {
		RuntimeSpec struct{ Annotations map[string]string }
	}
	if err := json.Unmarshal([]byte(answer.Info["info"]), &info); err != nil {
		n.Fatal(err)
	}
	return info.RuntimeSpec.Annotations["jumbo.dev/arm"]
}
