package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
)

func newArms(node string) arms { return arms{node: node, pods: map[string]member{}} }

// A pod of the owner x/NAME.
func pod(name string, number int) *api.PodSandbox {
	id := fmt.Sprintf("%s-%d", name, number)
	return &api.PodSandbox{Id: id, Name: id, Namespace: "x"}
}

// Returns by how many pods the covered ones of an owner are away from the share.
func (a *arms) deviation(owner string, percent int) float64 {
	pods, covered := a.count(owner)
	return float64(covered) - float64(pods*percent)/100
}

// Each pod that comes keeps the share within one pod.
func TestEachMomentIsWithinOnePod(t *testing.T) {
	for percent := range 101 {
		for _, node := range []string{"a", "b", "c"} {
			arms := newArms(node)
			for i := range 300 {
				for _, name := range []string{"web", "db"} {
					arms.assign(pod(name, i), percent)
					if by := arms.deviation("x/"+name, percent); math.Abs(by) >= 1 {
						t.Fatalf("%d%% on %s: %.2f pods off after %d", percent, node, by, i+1)
					}
				}
			}
		}
	}
}

// A pod in place of one that goes keeps it too: a rollout, an eviction. Where pods go and none comes, the running ones
// stay in their arms; new pods then bring the share back, and none makes it worse.
func TestRemovedPodsAreMadeUpFor(t *testing.T) {
	const owner = "x/web"
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		percent := random.IntN(101)
		arms := newArms(fmt.Sprint("node-", random.IntN(1000)))
		next := 0
		add := func() {
			arms.assign(pod("web", next), percent)
			next++
		}
		remove := func() {
			for id := range arms.pods {
				delete(arms.pods, id)
				return
			}
		}
		for range 1 + random.IntN(40) {
			add()
		}
		for range 20 {
			remove()
			add()
			if by := arms.deviation(owner, percent); math.Abs(by) >= 1 {
				t.Fatalf("%d%%: %.2f pods off after a replacement", percent, by)
			}
		}
		for range random.IntN(len(arms.pods)) {
			remove()
		}
		for before := math.Abs(arms.deviation(owner, percent)); ; {
			add()
			now := math.Abs(arms.deviation(owner, percent))
			if now >= 1 && now > before {
				t.Fatalf("%d%%: %.2f pods off, before a new one %.2f", percent, now, before)
			}
			if now < 1 {
				break
			}
			before = now
		}
	}
}

// With one pod a node, the share holds over nodes.
func TestManyNodesHaveTheShareOnAverage(t *testing.T) {
	for _, percent := range []int{0, 10, 50, 90, 100} {
		covered := 0
		for node := range 10000 {
			arms := newArms(fmt.Sprint("node-", node))
			if arms.assign(pod("web", 0), percent).isCovered {
				covered++
			}
		}
		// Six standard deviations, which are at most 50.
		if off := covered - 100*percent; off < -300 || off > 300 || (percent%100 == 0 && off != 0) {
			t.Errorf("%d of 10000 pods are covered at %d%%", covered, percent)
		}
	}
}

func TestAPodKeepsItsArm(t *testing.T) {
	arms := newArms("node")
	first := arms.assign(pod("web", 0), 50)
	for _, percent := range []int{0, 50, 100} {
		if arms.assign(pod("web", 0), percent) != first {
			t.Errorf("another arm at %d%%", percent)
		}
	}
}

func TestPercentagesAreWholeNumbersUpTo100(t *testing.T) {
	for text, expected := range map[string]int{"0": 0, "50": 50, "100": 100} {
		if found, err := percentage(text); found != expected || err != nil {
			t.Errorf("%q: %d, %v", text, found, err)
		}
	}
	for _, text := range []string{"", "x", "-1", "101", "50%", "5.5", "+5", " 5", "0x5", "5_0", "99999999999999999999", "\n"} {
		if found, err := percentage(text); err == nil {
			t.Errorf("%q was taken as %d", text, found)
		}
	}
}

func TestOwners(t *testing.T) {
	for _, test := range []struct {
		name, job, expected string
	}{
		{"web-5d9c7b-x2x4q", "", "x/web-5d9c7b"},
		{"db-0", "", "x/db"},
		{"alone", "", "x/alone"},
		{"-", "", "x/-"},
		{"", "", "x/"},
		{"sort-3-x2x4q", "sort", "x/sort"},
	} {
		pod := &api.PodSandbox{Name: test.name, Namespace: "x"}
		if test.job != "" {
			pod.Labels = map[string]string{"batch.kubernetes.io/job-name": test.job}
		}
		if found := owner(pod); found != test.expected {
			t.Errorf("%s: %s, not %s", test.name, found, test.expected)
		}
	}
}

func TestTheMetricOfTheArms(t *testing.T) {
	plugin := newPlugin("", "node")
	path := filepath.Join(t.TempDir(), "arms.prom")
	go plugin.export(t.Context(), path)
	plugin.arms.assign(pod("web", 0), 100)
	plugin.arms.assign(pod("web", 1), 0)
	plugin.arms.assign(pod("a\"\\\nb", 0), 0)
	plugin.tell()
	expected := `# HELP jumbo_arm_info Pods in an experiment (jumbo.dev/ab).
# TYPE jumbo_arm_info gauge
jumbo_arm_info{namespace="x",pod="a\"\\\nb-0",arm="plain"} 1
jumbo_arm_info{namespace="x",pod="web-0",arm="covered"} 1
jumbo_arm_info{namespace="x",pod="web-1",arm="plain"} 1
`
	var found []byte
	for deadline := time.Now().Add(time.Minute); string(found) != expected; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s", found)
		}
		found, _ = os.ReadFile(path)
	}
}
