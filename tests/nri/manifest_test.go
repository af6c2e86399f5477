package nri

import (
	"os"
	"slices"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/yaml"
)

func manifest(t *testing.T) apps.DaemonSet {
	text, err := os.ReadFile("../../packaging/nri/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var set apps.DaemonSet
	if err := yaml.UnmarshalStrict(text, &set); err != nil {
		t.Fatal(err)
	}
	return set
}

// The manifest has only fields of Kubernetes, and its containers use only volumes that it has.
func TestManifest(t *testing.T) {
	set := manifest(t)
	pod := set.Spec.Template.Spec
	for _, container := range slices.Concat(pod.InitContainers, pod.Containers) {
		for _, mount := range container.VolumeMounts {
			if !slices.ContainsFunc(pod.Volumes, func(volume core.Volume) bool { return volume.Name == mount.Name }) {
				t.Errorf("%s: no volume %s", container.Name, mount.Name)
			}
		}
	}
	for key, value := range set.Spec.Selector.MatchLabels {
		if set.Spec.Template.Labels[key] != value {
			t.Errorf("the selector does not match %s=%s", key, value)
		}
	}
}

// Runs the containers of the manifest like kubelet, on a node without the specification.
func daemonSet(n *node) {
	n.command(os.Getenv("JUMBO"), "cdi", "remove")
	spec := manifest(n.T).Spec.Template.Spec
	paths := map[string]string{}
	for _, volume := range spec.Volumes {
		paths[volume.Name] = volume.HostPath.Path
		if err := os.MkdirAll(volume.HostPath.Path, 0o755); err != nil {
			n.Fatal(err)
		}
	}
	configured := func(container core.Container) func(*cri.ContainerConfig) {
		return func(config *cri.ContainerConfig) {
			config.Command = container.Command
			for _, variable := range container.Env {
				config.Envs = append(config.Envs, &cri.KeyValue{Key: variable.Name, Value: "node"})
			}
			for _, mount := range container.VolumeMounts {
				config.Mounts = append(config.Mounts, &cri.Mount{
					HostPath: paths[mount.Name], ContainerPath: mount.MountPath, Readonly: mount.ReadOnly,
				})
			}
			security := config.Linux.SecurityContext
			security.ReadonlyRootfs = *container.SecurityContext.ReadOnlyRootFilesystem
			security.NoNewPrivs = !*container.SecurityContext.AllowPrivilegeEscalation
			security.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}}
			security.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
		}
	}
	pod := n.pod("daemonset", nil)
	for _, container := range spec.InitContainers {
		n.Logf("%s", pod.output(container.Name, "jumbo-nri", configured(container)))
	}
	plugin := spec.Containers[0]
	pod.start(plugin.Name, "jumbo-nri", configured(plugin))
	n.until("the plugin registers", func() bool {
		return strings.Contains(pod.said(plugin.Name), "are in experiments")
	})
	n.covered(n.heap("by-daemonset", "python", requested, nil))
	n.end(&n.containerd, os.Interrupt)
	n.startRuntime()
	n.until("the plugin registers again", func() bool {
		return strings.Count(pod.said(plugin.Name), "are in experiments") == 2
	})
	n.covered(n.heap("by-daemonset-again", "python", requested, nil))
	n.delete(pod.id)
	n.plain(n.heap("without-daemonset", "python", requested, nil))
}
