package kubernetes

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/v2/loader"
	admissionregistration "k8s.io/api/admissionregistration/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubernetes/third_party/forked/golang/expansion"
	security "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"k8s.io/utils/ptr"
)

const (
	label  = "jumbo.dev/memory"
	note   = "jumbo.dev/note"
	volume = "jumbo-library"
)

// Folder and library of the version that packaging/kubernetes/generate wrote into the chart.
var (
	folder  = "/usr/lib/jumbo/" + chartVersion()
	library = folder + "/$LIB/libjumbo_preload.so"
)

func chartVersion() string {
	chart, err := loader.Load(file("chart"))
	if err != nil {
		panic(err)
	}
	return chart.Metadata.AppVersion
}

type change func(*core.Pod)

// podOf is a pod with one container, app.
func podOf(changes ...change) *core.Pod {
	pod := &core.Pod{
		ObjectMeta: meta.ObjectMeta{Name: "pod", Namespace: "default", ResourceVersion: "1", Labels: map[string]string{label: "default"}},
		Spec:       core.PodSpec{Containers: []core.Container{container("app")}},
	}
	for _, change := range changes {
		change(pod)
	}
	return pod
}

func container(name string, env ...core.EnvVar) core.Container {
	return core.Container{Name: name, Image: "registry.example.com/" + name + ":1", Env: env}
}

func debugger(name string) core.EphemeralContainer {
	common := core.EphemeralContainerCommon{Name: name, Image: "registry.example.com/debug:1"}
	return core.EphemeralContainer{EphemeralContainerCommon: common}
}

func labelled(value string) change {
	return func(pod *core.Pod) { pod.Labels[label] = value }
}

func app(change func(*core.Container)) change {
	return func(pod *core.Pod) { change(&pod.Spec.Containers[0]) }
}

func withEnv(env ...core.EnvVar) change {
	return app(func(app *core.Container) { app.Env = env })
}

func withVolume(name string, source core.VolumeSource, path string) change {
	return func(pod *core.Pod) {
		pod.Spec.Volumes = append(pod.Spec.Volumes, core.Volume{Name: name, VolumeSource: source})
		app := &pod.Spec.Containers[0]
		app.VolumeMounts = append(app.VolumeMounts, core.VolumeMount{Name: name, MountPath: path})
	}
}

func variable(name, value string) core.EnvVar { return core.EnvVar{Name: name, Value: value} }

func fromField(name string) core.EnvVar {
	source := &core.EnvVarSource{FieldRef: &core.ObjectFieldSelector{FieldPath: "metadata.name", APIVersion: "v1"}}
	return core.EnvVar{Name: name, ValueFrom: source}
}

func fromMap(prefix string) core.EnvFromSource {
	reference := core.LocalObjectReference{Name: "settings"}
	return core.EnvFromSource{Prefix: prefix, ConfigMapRef: &core.ConfigMapEnvSource{LocalObjectReference: reference}}
}

// admitted is the pod after admission.
func (c cluster) admitted(t testing.TB, pod *core.Pod) *core.Pod {
	t.Helper()
	pod = pod.DeepCopy()
	if err := c.admit(pod, nil); err != nil {
		t.Fatal(err)
	}
	delete(pod.Labels, "ready")
	return pod
}

// values are the variables that the kubelet gives a container.
func values(env []core.EnvVar) map[string]string {
	known := map[string]string{}
	for _, variable := range env {
		known[variable.Name] = expansion.Expand(variable.Value, expansion.MappingFuncFor(known))
	}
	return known
}

// checkCovered reports what a container lacks.
func checkCovered(t *testing.T, pod *core.Pod, name string, env []core.EnvVar, mounts []core.VolumeMount) {
	t.Helper()
	found := values(env)
	if !strings.HasSuffix(found["LD_PRELOAD"], library) || strings.Count(found["LD_PRELOAD"], library) != 1 {
		t.Errorf("%s: LD_PRELOAD is %q", name, found["LD_PRELOAD"])
	}
	if !strings.Contains(found["JUMBO_ORDERS"], "container=1") {
		t.Errorf("%s: JUMBO_ORDERS is %q", name, found["JUMBO_ORDERS"])
	}
	own := slices.DeleteFunc(slices.Clone(mounts), func(mount core.VolumeMount) bool { return mount.Name != volume })
	if len(own) != 1 || own[0].MountPath != folder || !own[0].ReadOnly {
		t.Errorf("%s mounts %v", name, own)
	}
	has := func(volumes []core.Volume) int {
		return slices.IndexFunc(volumes, func(each core.Volume) bool { return each.Name == volume })
	}
	at := has(pod.Spec.Volumes)
	if at < 0 || pod.Spec.Volumes[at].Image == nil || pod.Spec.Volumes[at].Image.Reference != image ||
		pod.Spec.Volumes[at].Image.PullPolicy != core.PullIfNotPresent || has(pod.Spec.Volumes[at+1:]) >= 0 {
		t.Errorf("the volumes are %v", pod.Spec.Volumes)
	}
}

// isPlain reports whether the container has nothing of jumbo.
func isPlain(container core.Container) bool {
	text := fmt.Sprint(container.Env, container.VolumeMounts)
	return !strings.Contains(text, folder) && !strings.Contains(text, "JUMBO_ORDERS")
}

func TestContainersOfAllKindsAreCovered(t *testing.T) {
	c := covering(t)
	pod := podOf(func(pod *core.Pod) {
		pod.Spec.Containers = append(pod.Spec.Containers, container("second", variable("HOME", "/")))
		sidecar := container("sidecar")
		sidecar.RestartPolicy = ptr.To(core.ContainerRestartPolicyAlways)
		pod.Spec.InitContainers = []core.Container{container("init"), sidecar}
	})
	pod = c.admitted(t, pod)
	for _, each := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
		checkCovered(t, pod, each.Name, each.Env, each.VolumeMounts)
	}
	if pod.Annotations[note] != "" {
		t.Errorf("a note: %q", pod.Annotations[note])
	}

	// The first pod comes before the policy and may not be changed later.
	for at, c := range []cluster{newCluster(t), c, c} {
		after := pod.DeepCopy()
		after.Spec.EphemeralContainers = append(after.Spec.EphemeralContainers, debugger(fmt.Sprint("debugger-", at)))
		if err := c.admit(after, pod); err != nil {
			t.Fatal(err)
		}
		pod = after
	}
	for _, each := range pod.Spec.EphemeralContainers[1:] {
		checkCovered(t, pod, each.Name, each.Env, each.VolumeMounts)
	}
}

func TestADebuggerOfAPodThatStartedPlainStartsPlain(t *testing.T) {
	pod := newCluster(t).admitted(t, podOf())
	after := pod.DeepCopy()
	after.Spec.EphemeralContainers = []core.EphemeralContainer{debugger("debugger")}
	if err := covering(t).admit(after, pod); err != nil {
		t.Fatal(err)
	}
	if found := after.Spec.EphemeralContainers[0]; len(found.Env) != 0 || len(found.VolumeMounts) != 0 {
		t.Errorf("it has %v", found)
	}
}

func TestVariablesOfAPodAreMerged(t *testing.T) {
	c := covering(t)
	for name, test := range map[string]struct {
		env     []core.EnvVar
		envFrom []core.EnvFromSource
		expect  map[string]string
	}{
		"LD_PRELOAD": {
			env:    []core.EnvVar{variable("LD_PRELOAD", "/opt/agent.so")},
			expect: map[string]string{"LD_PRELOAD": "/opt/agent.so:" + library},
		},
		"an empty LD_PRELOAD": {
			env:    []core.EnvVar{variable("LD_PRELOAD", "")},
			expect: map[string]string{"LD_PRELOAD": library},
		},
		"references keep their order": {
			env: []core.EnvVar{variable("AGENT", "/opt/agent.so"), variable("LD_PRELOAD", "$(AGENT)"), variable("SHOWN", "$(LD_PRELOAD)")},
			expect: map[string]string{
				"LD_PRELOAD": "/opt/agent.so:" + library,
				"SHOWN":      "/opt/agent.so:" + library,
			},
		},
		"GLIBC_TUNABLES": {
			env:    []core.EnvVar{variable("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")},
			expect: map[string]string{"GLIBC_TUNABLES": "glibc.malloc.arena_max=2", "LD_PRELOAD": library},
		},
		"JUMBO_ORDERS": {
			env:    []core.EnvVar{variable("JUMBO_ORDERS", "heap=0")},
			expect: map[string]string{"JUMBO_ORDERS": "heap=0", "LD_PRELOAD": library},
		},
		"envFrom, and LD_PRELOAD said": {
			env:     []core.EnvVar{variable("LD_PRELOAD", "")},
			envFrom: []core.EnvFromSource{fromMap("")},
			expect:  map[string]string{"LD_PRELOAD": library},
		},
		"envFrom with a prefix": {
			envFrom: []core.EnvFromSource{fromMap("APP_")},
			expect:  map[string]string{"LD_PRELOAD": library},
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := c.admitted(t, podOf(withEnv(test.env...), app(func(app *core.Container) { app.EnvFrom = test.envFrom })))
			app := pod.Spec.Containers[0]
			found := values(app.Env)
			for name, value := range test.expect {
				if found[name] != value {
					t.Errorf("%s is %q", name, found[name])
				}
			}
			if isPlain(app) || pod.Annotations[note] != "" {
				t.Errorf("%v, with the note %q", app, pod.Annotations[note])
			}
			// Each variable of the pod keeps its place.
			for at, variable := range test.env {
				if app.Env[at].Name != variable.Name {
					t.Errorf("%d is %s", at, app.Env[at].Name)
				}
			}
		})
	}
}

func TestPodsThatStayAsTheyAre(t *testing.T) {
	c, without := covering(t), newCluster(t)
	for name, test := range map[string]struct {
		change change
		note   string
	}{
		"no label":         {func(pod *core.Pod) { pod.Labels = nil }, ""},
		"label off":        {labelled("off"), ""},
		"kube-system":      {func(pod *core.Pod) { pod.Namespace = "kube-system" }, ""},
		"Windows":          {func(pod *core.Pod) { pod.Spec.OS = &core.PodOS{Name: core.Windows} }, ""},
		"Windows by nodes": {func(pod *core.Pod) { pod.Spec.NodeSelector = map[string]string{core.LabelOSStable: "windows"} }, ""},
		"a mirror pod": {func(pod *core.Pod) {
			pod.Spec.NodeName = "node"
			pod.Annotations = map[string]string{core.MirrorPodAnnotationKey: "hash"}
		}, ""},
		"another volume of the name": {
			withVolume(volume, core.VolumeSource{EmptyDir: &core.EmptyDirVolumeSource{}}, "/data"),
			"without jumbo: its volume jumbo-library is another",
		},
		"a volume above the library": {
			withVolume("lib", core.VolumeSource{EmptyDir: &core.EmptyDirVolumeSource{}}, "/usr/lib"),
			"without jumbo: app (a volume is mounted in place of the library)",
		},
		"a volume in place of the library": {
			withVolume("own", core.VolumeSource{EmptyDir: &core.EmptyDirVolumeSource{}}, folder),
			"without jumbo: app (a volume is mounted in place of the library)",
		},
		"JUMBO=off":                 {withEnv(variable("JUMBO", "off")), "without jumbo: app (JUMBO=off)"},
		"LD_PRELOAD from elsewhere": {withEnv(fromField("LD_PRELOAD")), "without jumbo: app (LD_PRELOAD is from elsewhere)"},
		"LD_PRELOAD twice": {
			withEnv(variable("LD_PRELOAD", "a.so"), variable("LD_PRELOAD", "b.so")),
			"without jumbo: app (LD_PRELOAD is there twice)",
		},
		"envFrom": {
			app(func(app *core.Container) { app.EnvFrom = []core.EnvFromSource{fromMap("")} }),
			"without jumbo: app (envFrom may set LD_PRELOAD)",
		},
		"envFrom with part of the name as its prefix": {
			app(func(app *core.Container) { app.EnvFrom = []core.EnvFromSource{fromMap("LD_")} }),
			"without jumbo: app (envFrom may set LD_PRELOAD)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := podOf(test.change)
			found, expected := c.admitted(t, pod), without.admitted(t, pod)
			if found.Annotations[note] != test.note {
				t.Errorf("the note is %q", found.Annotations[note])
			}
			if !equality.Semantic.DeepEqual(found.Spec, expected.Spec) {
				t.Errorf("changed to %v", found.Spec)
			}
		})
	}
}

func TestOneContainerThatCannotBeCoveredStaysAlone(t *testing.T) {
	pod := covering(t).admitted(t, podOf(func(pod *core.Pod) {
		pod.Spec.Containers = append(pod.Spec.Containers, container("other", fromField("LD_PRELOAD")))
		pod.Annotations = map[string]string{"own": "stays"}
	}))
	app, other := pod.Spec.Containers[0], pod.Spec.Containers[1]
	checkCovered(t, pod, app.Name, app.Env, app.VolumeMounts)
	if !isPlain(other) {
		t.Errorf("covered: %v", other)
	}
	if pod.Annotations["own"] != "stays" || pod.Annotations[note] != "without jumbo: other (LD_PRELOAD is from elsewhere)" {
		t.Errorf("the annotations are %v", pod.Annotations)
	}
}

func TestProfiles(t *testing.T) {
	c := covering(t)
	orders := func(profile string) (string, string) {
		pod := c.admitted(t, podOf(labelled(profile)))
		checkCovered(t, pod, profile, pod.Spec.Containers[0].Env, pod.Spec.Containers[0].VolumeMounts)
		return values(pod.Spec.Containers[0].Env)["JUMBO_ORDERS"], pod.Annotations[note]
	}
	usual, noted := orders("default")
	if noted != "" {
		t.Errorf("a note: %q", noted)
	}
	if node, noted := orders("node"); node == usual || !strings.Contains(node, "text=file") || noted != "" {
		t.Errorf("the profile node is %q, with the note %q", node, noted)
	}
	for _, unknown := range []string{"fast", ""} {
		if found, noted := orders(unknown); found != usual || noted != "no profile "+unknown+", so default" {
			t.Errorf("the profile %q is %q, with the note %q", unknown, found, noted)
		}
	}
}

// Its base has no image, and its policy then changes nothing that could prevent a start.
func TestThePolicyWithoutAnImageAddsNothing(t *testing.T) {
	pod := newCluster(t, strict(byKustomize(t, file()))...).admitted(t, podOf())
	if !isPlain(pod.Spec.Containers[0]) || len(pod.Spec.Volumes) != 0 {
		t.Errorf("changed: %v", pod.Spec)
	}
	if pod.Annotations[note] != "without jumbo: the policy has no library image" {
		t.Errorf("the note is %q", pod.Annotations[note])
	}
}

// The same pod again, as submitted by a tool that copies it.
func TestNothingIsAddedTwice(t *testing.T) {
	c := covering(t)
	once := c.admitted(t, podOf(withEnv(variable("LD_PRELOAD", "/opt/agent.so"))))
	twice := c.admitted(t, once)
	if !equality.Semantic.DeepEqual(once.Spec, twice.Spec) {
		t.Errorf("%v\nand then %v", once.Spec, twice.Spec)
	}
}

// Another policy sets LD_PRELOAD and adds a sidecar, before or after this one: an API server
// applies policies in any order, which differs between clusters.
func TestTwoPolicies(t *testing.T) {
	for range 8 {
		other := policyThat("other", `Object{spec: Object.spec{
			containers: object.spec.containers.map(c, Object.spec.containers{name: c.name, env: [
				Object.spec.containers.env{name: "LD_PRELOAD", value:
					c.?env.orValue([]).exists(e, e.name == "LD_PRELOAD" && e.value.contains("agent.so"))
					? c.env.filter(e, e.name == "LD_PRELOAD")[0].value : "/opt/agent.so"},
				Object.spec.containers.env{name: "AGENT", value: "on"}]}),
			initContainers: [Object.spec.initContainers{name: "mesh", image: "registry.example.com/mesh:1", restartPolicy: "Always"}]}}`)
		pod := covering(t, other...).admitted(t, podOf())
		for _, each := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
			checkCovered(t, pod, each.Name, each.Env, each.VolumeMounts)
		}
		found := values(pod.Spec.Containers[0].Env)
		if len(pod.Spec.InitContainers) != 1 || found["AGENT"] != "on" || found["LD_PRELOAD"] != "/opt/agent.so:"+library {
			t.Errorf("the pod is %v", pod.Spec)
		}
	}
}

func TestAPodIsAdmittedAsItIsWhereThePolicyFails(t *testing.T) {
	objects := installed(t)
	objects[0].(*admissionregistration.MutatingAdmissionPolicy).Spec.Variables[0].Expression = "string(1 / 0)"
	found, expected := newCluster(t, objects...).admitted(t, podOf()), newCluster(t).admitted(t, podOf())
	if !equality.Semantic.DeepEqual(found, expected) {
		t.Errorf("changed to %v", found)
	}
	if err := newCluster(t, strict(objects)...).admit(podOf(), nil); err == nil {
		t.Error("the policy does not fail")
	}
}

// A pod beyond the limits of CEL would stay plain, by the failure policy.
func TestLargePodsAreWithinTheLimitsOfCel(t *testing.T) {
	c := covering(t)
	pod := podOf(func(pod *core.Pod) {
		pod.Spec.Containers = nil
		for i := range 100 {
			each := container(fmt.Sprintf("app-%d", i))
			for j := range 50 {
				each.Env = append(each.Env, variable(fmt.Sprintf("VARIABLE_%d", j), strings.Repeat("x", 100)))
			}
			pod.Spec.Containers = append(pod.Spec.Containers, each)
		}
	})
	pod = c.admitted(t, pod)
	for _, each := range pod.Spec.Containers {
		checkCovered(t, pod, each.Name, each.Env, each.VolumeMounts)
	}
}

func TestPodsKeepTheirSecurityStandard(t *testing.T) {
	c := covering(t)
	hardened := podOf(func(pod *core.Pod) {
		pod.Spec.SecurityContext = &core.PodSecurityContext{
			RunAsNonRoot:   ptr.To(true),
			SeccompProfile: &core.SeccompProfile{Type: core.SeccompProfileTypeRuntimeDefault},
		}
		pod.Spec.Containers[0].SecurityContext = &core.SecurityContext{
			AllowPrivilegeEscalation: ptr.To(false),
			ReadOnlyRootFilesystem:   ptr.To(true),
			Capabilities:             &core.Capabilities{Drop: []core.Capability{"ALL"}},
		}
	})
	pod := c.admitted(t, hardened)
	checkCovered(t, pod, "app", pod.Spec.Containers[0].Env, pod.Spec.Containers[0].VolumeMounts)
	checkRestricted(t, pod)
}

func checkRestricted(t *testing.T, pod *core.Pod) {
	t.Helper()
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	restricted := security.LevelVersion{Level: security.LevelRestricted, Version: security.LatestVersion()}
	if found := policy.AggregateCheckResults(evaluator.EvaluatePod(restricted, &pod.ObjectMeta, &pod.Spec)); !found.Allowed {
		t.Error(found.ForbiddenDetail())
	}
}

func TestTheCanaryMountsTheImage(t *testing.T) {
	objects := decode(t, read(t, file("canary.yaml")))
	set := objects[0].(*apps.DaemonSet)
	pod := &core.Pod{ObjectMeta: set.Spec.Template.ObjectMeta, Spec: set.Spec.Template.Spec}
	pod.Name, pod.Namespace = "canary", "default"
	pod = covering(t).admitted(t, pod)
	checkCovered(t, pod, "the canary", pod.Spec.Containers[0].Env, pod.Spec.Containers[0].VolumeMounts)
	checkRestricted(t, pod)
}

// API server time for one pod: `go test -bench . -run -`.
func BenchmarkAdmission(b *testing.B) {
	env := make([]core.EnvVar, 20)
	for i := range env {
		env[i] = variable(fmt.Sprintf("VARIABLE_%d", i), "value")
	}
	for name, c := range map[string]cluster{"with": covering(b), "without": newCluster(b)} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				c.admitted(b, podOf(withEnv(env...)))
			}
		})
	}
}
