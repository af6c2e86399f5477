package nri

import (
	"os"
	"slices"
	"testing"

	apps "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"
)

// The manifest has only fields of Kubernetes, and its containers use only volumes that it has.
func TestManifest(t *testing.T) {
	text, err := os.ReadFile("../../packaging/nri/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var set apps.DaemonSet
	if err := yaml.UnmarshalStrict(text, &set); err != nil {
		t.Fatal(err)
	}
	pod := set.Spec.Template.Spec
	volumes := map[string]bool{}
	for _, volume := range pod.Volumes {
		volumes[volume.Name] = volume.HostPath != nil
	}
	for _, container := range slices.Concat(pod.InitContainers, pod.Containers) {
		for _, mount := range container.VolumeMounts {
			if !volumes[mount.Name] {
				t.Errorf("%s: no volume %s", container.Name, mount.Name)
			}
		}
		if security := container.SecurityContext; security == nil || !*security.ReadOnlyRootFilesystem || len(security.Capabilities.Drop) != 1 {
			t.Errorf("%s is not confined: %+v", container.Name, security)
		}
	}
	for key, value := range set.Spec.Selector.MatchLabels {
		if set.Spec.Template.Labels[key] != value {
			t.Errorf("the selector does not match %s=%s", key, value)
		}
	}
}
