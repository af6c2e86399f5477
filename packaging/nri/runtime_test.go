package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

// The runtime's half of NRI, and the plugin beside it.
type fixture struct {
	testing.TB
	folder     string
	runtime    *adaptation.Adaptation
	pods       []*api.PodSandbox
	containers []*api.Container
	told       chan int
	// The plugin's connections to the runtime, which would go with its process.
	connections []net.Conn
	mutex       sync.Mutex
}

func newFixture(t testing.TB) *fixture {
	f := &fixture{TB: t, folder: t.TempDir(), told: make(chan int, 100)}
	specify(t, f.folder)
	f.startRuntime()
	t.Cleanup(func() { f.runtime.Stop() })
	f.relay()
	return f
}

// Relays the connections of the plugin to the runtime, so that endRuntime can end them.
func (f *fixture) relay() {
	listener, err := net.Listen("unix", filepath.Join(f.folder, "relay.sock"))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { listener.Close() })
	go func() {
		for {
			plugin, err := listener.Accept()
			if err != nil {
				return
			}
			runtime, err := net.Dial("unix", filepath.Join(f.folder, "nri.sock"))
			if err != nil {
				plugin.Close()
				continue
			}
			f.mutex.Lock()
			f.connections = append(f.connections, plugin, runtime)
			f.mutex.Unlock()
			go io.Copy(plugin, runtime)
			go io.Copy(runtime, plugin)
		}
	}()
}

func (f *fixture) endRuntime() {
	f.runtime.Stop()
	f.mutex.Lock()
	defer f.mutex.Unlock()
	for _, connection := range f.connections {
		connection.Close()
	}
}

func (f *fixture) startRuntime() {
	sync := func(ctx context.Context, synchronize adaptation.SyncCB) error {
		_, err := synchronize(ctx, f.pods, f.containers)
		f.told <- len(f.pods)
		return err
	}
	update := func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) { return nil, nil }
	runtime, err := adaptation.New("test", "1", sync, update, adaptation.WithSocketPath(filepath.Join(f.folder, "nri.sock")),
		adaptation.WithPluginPath(filepath.Join(f.folder, "plugins")), adaptation.WithPluginConfigPath(filepath.Join(f.folder, "conf")))
	if err == nil {
		err = runtime.Start()
	}
	if err != nil {
		f.Fatal(err)
	}
	// It has told its own plugins, of which there are none.
	<-f.told
	f.runtime = runtime
}

// Starts the plugin; the result ends it.
func (f *fixture) startPlugin(index string) func() {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		run(ctx, newPlugin(filepath.Join(f.folder, "jumbo.json"), "node"), filepath.Join(f.folder, "relay.sock"), index)
		close(ended)
	}()
	f.registered()
	stop := sync.OnceFunc(func() { cancel(); <-ended })
	f.Cleanup(stop)
	return stop
}

// Waits until a plugin has been told of all pods, and hears events.
func (f *fixture) registered() {
	f.Helper()
	select {
	case <-f.told:
		// The runtime adds it before this ends.
		f.runtime.BlockPluginSync().Unblock()
	case <-time.After(time.Minute):
		f.Fatal("no plugin registered")
	}
}

// Creates a container as the runtime does. The result: its variables, and the whole change.
func (f *fixture) create(pod *api.PodSandbox, container *api.Container) (map[string]string, *api.ContainerAdjustment) {
	f.Helper()
	container.PodSandboxId = pod.Id
	answer, err := f.runtime.CreateContainer(context.Background(), &api.CreateContainerRequest{Pod: pod, Container: container})
	if err != nil {
		f.Fatalf("the container fails: %v", err)
	}
	set := map[string]string{}
	for _, variable := range answer.GetAdjust().GetEnv() {
		set[variable.Key] = variable.Value
	}
	return set, answer.GetAdjust()
}

func requesting(name string, more ...string) *api.PodSandbox {
	annotations := map[string]string{memoryKey: "default"}
	for i := 0; i < len(more); i += 2 {
		annotations[more[i]] = more[i+1]
	}
	return &api.PodSandbox{Id: name, Name: name, Namespace: "test", Annotations: annotations}
}

func TestContainersAreCoveredByAnnotation(t *testing.T) {
	f := newFixture(t)
	f.startPlugin("90")
	set, adjust := f.create(requesting("a"), &api.Container{Id: "a", Name: "main", Env: []string{"LD_PRELOAD=own.so"}})
	if set["LD_PRELOAD"] != "own.so:/usr/lib/jumbo/1.0/${LIB}/libjumbo_preload.so" || set["JUMBO_ORDERS"] != "heap=1" ||
		len(set) != 2 {
		t.Errorf("%q", set)
	}
	if len(adjust.Mounts) != 1 || adjust.Mounts[0].Destination != "/usr/lib/jumbo/1.0" || adjust.Annotations[memoryKey] != "default" {
		t.Errorf("%v", adjust)
	}
	for name, pod := range map[string]*api.PodSandbox{
		"no annotation": {Id: "b"},
		"off":           {Id: "c", Annotations: map[string]string{memoryKey: "off"}},
		"another's":     {Id: "d", Annotations: map[string]string{"memory.jumbo.dev/container.other": "default"}},
		"switched off":  requesting("e", "memory.jumbo.dev/container.main", "off"),
	} {
		if set, _ := f.create(pod, &api.Container{Id: pod.Id, Name: "main"}); len(set) != 0 {
			t.Errorf("%s: %q", name, set)
		}
	}
	set, _ = f.create(requesting("f", "memory.jumbo.dev/container.main", "node"), &api.Container{Id: "f", Name: "main"})
	if set["JUMBO_ORDERS"] != "text=file" {
		t.Errorf("%q", set)
	}
}

func TestAContainerWhoseFilterKillsIsLeftAlone(t *testing.T) {
	f := newFixture(t)
	f.startPlugin("90")
	for action, variables := range map[string]int{"SCMP_ACT_KILL_PROCESS": 0, "SCMP_ACT_ERRNO": 2} {
		filter := &api.LinuxSeccomp{DefaultAction: "SCMP_ACT_ALLOW", Syscalls: []*api.LinuxSyscall{
			{Names: []string{"madvise"}, Action: action},
		}}
		container := &api.Container{Id: action, Name: "main", Linux: &api.LinuxContainer{SeccompPolicy: filter}}
		if set, _ := f.create(requesting(action), container); len(set) != variables {
			t.Errorf("%s: %q", action, set)
		}
	}
}

// Sets variables of its own, as another vendor's plugin.
type other struct{}

func (other) CreateContainer(
	context.Context, *api.PodSandbox, *api.Container,
) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	adjust := &api.ContainerAdjustment{}
	adjust.AddEnv("LD_PRELOAD", "theirs.so")
	return adjust, nil, nil
}

func TestAnEarlierPluginsVariableIsKept(t *testing.T) {
	f := newFixture(t)
	link, err := stub.New(other{}, stub.WithPluginName("other"), stub.WithPluginIdx("10"), stub.WithSocketPath(filepath.Join(f.folder, "nri.sock")))
	if err == nil {
		err = link.Start(context.Background())
	}
	if err != nil {
		t.Fatal(err)
	}
	defer link.Stop()
	f.registered()
	f.startPlugin("90")
	set, _ := f.create(requesting("a"), &api.Container{Id: "a", Name: "main", Env: []string{"LD_PRELOAD=own.so"}})
	if set["LD_PRELOAD"] != "theirs.so:/usr/lib/jumbo/1.0/${LIB}/libjumbo_preload.so" {
		t.Errorf("%q", set)
	}
}

func TestASecondPluginOfThisKindAddsNothing(t *testing.T) {
	f := newFixture(t)
	f.startPlugin("90")
	f.startPlugin("91")
	arms := map[string]int{}
	for i := range 20 {
		pod := requesting(fmt.Sprintf("web-%d", i), abKey, "50")
		set, _ := f.create(pod, &api.Container{Id: pod.Id, Name: "main"})
		if isCovered := set["JUMBO_ORDERS"] != ""; isCovered != (set[armVariable] == coveredArm) {
			t.Errorf("%q", set)
		}
		if strings.Count(set["LD_PRELOAD"], "libjumbo") > 1 {
			t.Errorf("%q", set)
		}
		arms[set[armVariable]]++
	}
	if arms[coveredArm] != 10 || arms[plainArm] != 10 {
		t.Errorf("%v", arms)
	}
}

// The arms are the same after restarts of the plugin and of the runtime, and pods that are gone do not count.
func TestArmsSurviveRestarts(t *testing.T) {
	f := newFixture(t)
	stop := f.startPlugin("90")
	covered := 0
	add := func() {
		pod := requesting(fmt.Sprintf("web-%d", len(f.pods)), abKey, "30")
		set, adjust := f.create(pod, &api.Container{Id: pod.Id, Name: "main"})
		f.pods = append(f.pods, pod)
		f.containers = append(f.containers, &api.Container{Id: pod.Id, PodSandboxId: pod.Id, Annotations: adjust.Annotations})
		if set[armVariable] == coveredArm {
			covered++
		}
		if off := float64(covered) - 0.3*float64(len(f.pods)); off <= -1 || off >= 1 {
			t.Errorf("%d of %d are covered", covered, len(f.pods))
		}
		// A second container of the pod.
		if again, _ := f.create(pod, &api.Container{Id: pod.Id + "-2", Name: "second"}); again[armVariable] != set[armVariable] {
			t.Errorf("two arms in one pod: %q, %q", set, again)
		}
	}
	for range 7 {
		add()
	}
	stop()
	stop = f.startPlugin("90")
	for range 7 {
		add()
	}
	f.endRuntime()
	f.startRuntime()
	f.registered()
	for range 7 {
		add()
	}
	for _, pod := range f.pods {
		if err := f.runtime.StopPodSandbox(context.Background(), &api.StopPodSandboxRequest{Pod: pod}); err != nil {
			t.Fatal(err)
		}
	}
	f.pods, f.containers, covered = nil, nil, 0
	for range 10 {
		add()
	}
}

// The plugin's answer to any annotations and environment is no error, and no panic.
func FuzzCreateContainer(f *testing.F) {
	for _, share := range []string{"", "x", "-1", "101", "50"} {
		f.Add("default", share, "main", "LD_PRELOAD=a.so")
	}
	f.Add(strings.Repeat("\n\x00", 1000), "50", "", "=")
	path := specify(f, f.TempDir())
	plugin := newPlugin(path, "node")
	f.Fuzz(func(t *testing.T, profile, share, name, variable string) {
		pod := &api.PodSandbox{Id: share, Name: name, Annotations: map[string]string{memoryKey: profile, abKey: share}}
		if _, _, err := plugin.CreateContainer(context.Background(), pod, &api.Container{Name: name, Env: []string{variable}}); err != nil {
			t.Error(err)
		}
		if _, _, err := plugin.CreateContainer(context.Background(), nil, nil); err != nil {
			t.Error(err)
		}
		if _, err := plugin.Synchronize(context.Background(), []*api.PodSandbox{pod, nil}, []*api.Container{{PodSandboxId: share}, nil}); err != nil {
			t.Error(err)
		}
	})
}

// Events of several pods at once; for the race detector.
func TestEventsAtTheSameTime(t *testing.T) {
	plugin := newPlugin(specify(t, t.TempDir()), "node")
	var all sync.WaitGroup
	for worker := range 8 {
		all.Add(1)
		go func() {
			defer all.Done()
			for i := range 50 {
				pod := requesting(fmt.Sprintf("web-%d-%d", worker, i), abKey, "50")
				plugin.CreateContainer(context.Background(), pod, &api.Container{Name: "main"})
				plugin.Synchronize(context.Background(), []*api.PodSandbox{pod}, nil)
				plugin.StopPodSandbox(context.Background(), pod)
			}
		}()
	}
	all.Wait()
	if len(plugin.arms.pods) != 0 {
		t.Errorf("%d pods are left", len(plugin.arms.pods))
	}
}

// The time that a container's start waits for the plugin: with the runtime's half, and 250 pods of an experiment.
func BenchmarkCreateContainer(b *testing.B) {
	f := newFixture(b)
	f.startPlugin("90")
	for i := range 250 {
		f.create(requesting(fmt.Sprintf("web-%d", i), abKey, "50"), &api.Container{Name: "main"})
	}
	container := &api.Container{Name: "main", Env: []string{"LD_PRELOAD=own.so"}}
	for b.Loop() {
		f.create(requesting("web-0", abKey, "50"), container)
	}
}
