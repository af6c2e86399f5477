package nri

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Timeout of each wait, for a busy machine.
const timeout = 2 * time.Minute

const configuration = `version = 2
disabled_plugins = ["io.containerd.internal.v1.opt"]
root = "%[1]s/root"
state = "%[1]s/state"
[grpc]
address = "%[1]s/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:1"
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.nri.v1.nri"]
disable = false
plugin_path = "%[1]s/plugins"
plugin_config_path = "%[1]s/conf.d"
`

// A node: containerd, the plugin, and the CDI specification of jumbo.
type node struct {
	*testing.T
	folder     string
	containerd *exec.Cmd
	plugin     *exec.Cmd
	runtime    cri.RuntimeServiceClient
	started    int
}

// Returns the files that tests/nri/run created.
func made(name string) string {
	return filepath.Join(os.Getenv("NRI_MADE"), name)
}

func newNode(t *testing.T) *node {
	if os.Getenv("NRI_MADE") == "" {
		t.Skip("started without tests/nri/run")
	}
	n := &node{T: t, folder: os.Getenv("NRI_WORK")}
	t.Cleanup(n.stop)
	n.write("config.toml", fmt.Sprintf(configuration, n.folder))
	n.generate()
	n.startRuntime()
	images, err := filepath.Glob(made("images/*.tar"))
	if err != nil || len(images) == 0 {
		t.Fatal("no images", err)
	}
	for _, image := range images {
		n.command("ctr", "-a", n.path("containerd.sock"), "-n", "k8s.io", "images", "import", image)
	}
	return n
}

func (n *node) path(name string) string { return filepath.Join(n.folder, name) }

func (n *node) write(name, text string) {
	if err := os.WriteFile(n.path(name), []byte(text), 0o600); err != nil {
		n.Fatal(err)
	}
}

func (n *node) command(name string, arguments ...string) {
	n.Helper()
	if said, err := exec.Command(name, arguments...).CombinedOutput(); err != nil {
		n.Fatalf("%s %v: %v\n%s", name, arguments, err, said)
	}
}

// As in the manifest.
func (n *node) generate() {
	n.command(os.Getenv("JUMBO"), "cdi", "generate", "--library", "/var/lib/jumbo/cdi")
}

// Starts a process whose standard error goes to a file.
func (n *node) start(name string, arguments ...string) *exec.Cmd {
	log, err := os.OpenFile(n.path(filepath.Base(name)+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		n.Fatal(err)
	}
	defer log.Close()
	command := exec.Command(name, arguments...)
	command.Stderr = log
	if err := command.Start(); err != nil {
		n.Fatal(err)
	}
	return command
}

func (n *node) end(process **exec.Cmd, signal os.Signal) {
	if *process == nil {
		return
	}
	(*process).Process.Signal(signal)
	(*process).Wait()
	*process = nil
}

func (n *node) startRuntime() {
	n.containerd = n.start("containerd", "--config", n.path("config.toml"))
	connection, err := grpc.NewClient("unix://"+n.path("containerd.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		n.Fatal(err)
	}
	n.runtime = cri.NewRuntimeServiceClient(connection)
	n.until("containerd answers", func() bool {
		_, err := n.runtime.Version(context.Background(), &cri.VersionRequest{})
		return err == nil
	})
}

// Starts the plugin, and waits until it has registered and received all pods.
func (n *node) startPlugin() {
	n.until("containerd listens for plugins", func() bool {
		_, err := os.Stat("/var/run/nri/nri.sock")
		return err == nil
	})
	n.plugin = n.start(made("jumbo-nri"), "-textfile", n.path("arms.prom"))
	n.registered()
}

// Waits until the plugin has registered once more than at the last call.
func (n *node) registered() {
	n.started++
	n.until("the plugin registers", func() bool { return strings.Count(n.said(), "are in experiments") == n.started })
}

// Returns the log of the plugin.
func (n *node) said() string {
	text, _ := os.ReadFile(n.path("jumbo-nri.log"))
	return string(text)
}

func (n *node) until(event string, happened func() bool) {
	n.Helper()
	for deadline := time.Now().Add(timeout); !happened(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			log, _ := os.ReadFile(n.path("containerd.log"))
			n.Fatalf("waited for: %s\n%s\n%s", event, n.said(), log)
		}
	}
}

func (n *node) stop() {
	n.end(&n.plugin, syscall.SIGTERM)
	n.end(&n.containerd, syscall.SIGTERM)
	if n.Failed() {
		n.Logf("the plugin said:\n%s", n.said())
	}
}

// A pod with the host's network, which runs its containers in turn.
type pod struct {
	*node
	id     string
	config *cri.PodSandboxConfig
}

func (n *node) pod(name string, annotations map[string]string) pod {
	n.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	config := &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Namespace: "test", Uid: name},
		Annotations:  annotations,
		LogDirectory: n.path("logs/" + name),
		Linux: &cri.LinuxPodSandboxConfig{CgroupParent: "/jumbo-nri-test", SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Network: cri.NamespaceMode_NODE},
		}},
	}
	answer, err := n.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	if err != nil {
		n.Fatal(err)
	}
	return pod{n, answer.PodSandboxId, config}
}

func (n *node) delete(id string) {
	n.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if _, err := n.runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		n.Error(err)
	}
	if _, err := n.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
		n.Error(err)
	}
}

// Starts a container; changed modifies its configuration.
func (p pod) start(name, image string, changed func(*cri.ContainerConfig), command ...string) string {
	p.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	config := &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name},
		Image:    &cri.ImageSpec{Image: "localhost/" + image + ":1"},
		Command:  command,
		LogPath:  name + ".log",
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Network: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_CONTAINER},
		}},
	}
	if changed != nil {
		changed(config)
	}
	answer, err := p.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: p.id, Config: config, SandboxConfig: p.config,
	})
	if err != nil {
		p.Fatal(err)
	}
	if _, err := p.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: answer.ContainerId}); err != nil {
		p.Fatal(err)
	}
	return answer.ContainerId
}

// Runs a container to its end, and returns its output.
func (p pod) output(name, image string, changed func(*cri.ContainerConfig), command ...string) string {
	p.Helper()
	id := p.start(name, image, changed, command...)
	var status *cri.ContainerStatus
	p.until("the container ends", func() bool {
		answer, err := p.runtime.ContainerStatus(context.Background(), &cri.ContainerStatusRequest{ContainerId: id})
		if err != nil {
			p.Fatal(err)
		}
		status = answer.Status
		return status.State == cri.ContainerState_CONTAINER_EXITED
	})
	said := p.said(name)
	if status.ExitCode != 0 {
		p.Fatalf("%s ended with %d: %s", name, status.ExitCode, said)
	}
	return said
}

// Returns the output of a container.
func (p pod) said(name string) string {
	text, err := os.ReadFile(filepath.Join(p.config.LogDirectory, name+".log"))
	if err != nil {
		p.Fatal(err)
	}
	said := strings.Builder{}
	for line := range strings.Lines(string(text)) {
		// TIME STREAM TAG TEXT
		if words := strings.SplitN(line, " ", 4); len(words) == 4 {
			said.WriteString(words[3])
		}
	}
	return said.String()
}

// A part of the test, after which the next one runs too.
func (n *node) part(name string, check func(*node)) {
	whole := n.T
	whole.Run(name, func(t *testing.T) {
		n.T = t
		defer func() { n.T = whole }()
		check(n)
	})
}
