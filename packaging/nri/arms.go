package main

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"github.com/containerd/nri/pkg/api"
)

// The arm of each pod that is in an experiment.
//
// Invariant: of n pods of an owner, floor(n * percent + u) are covered while none is removed. u in [0, 1) follows from the
// node and the owner. So each node is within one pod of the share, and many nodes with few pods each have it on average.
// After removals each new pod goes to the arm that lacks one.
type arms struct {
	node string
	pods map[string]member // by the ID of the sandbox
}

type member struct {
	namespace, name string
	owner           string
	isCovered       bool
}

func newMember(pod *api.PodSandbox, isCovered bool) member {
	return member{pod.GetNamespace(), pod.GetName(), owner(pod), isCovered}
}

func (m member) arm() string {
	if m.isCovered {
		return coveredArm
	}
	return plainArm
}

// Puts a pod into an arm. A pod keeps its arm.
func (a *arms) assign(pod *api.PodSandbox, percent int) member {
	if known, ok := a.pods[pod.GetId()]; ok {
		return known
	}
	owner := owner(pod)
	pods, covered := a.count(owner)
	member := newMember(pod, covered < ((pods+1)*percent+a.offset(owner))/100)
	a.pods[pod.GetId()] = member
	return member
}

// Returns the number of an owner's pods, and of those that are covered.
func (a *arms) count(owner string) (pods, covered int) {
	for _, pod := range a.pods {
		if pod.owner == owner {
			pods++
			if pod.isCovered {
				covered++
			}
		}
	}
	return pods, covered
}

// 100 * u.
func (a *arms) offset(owner string) int {
	sum := sha256.Sum256([]byte(a.node + "\x00" + owner))
	return int(binary.LittleEndian.Uint64(sum[:]) % 100)
}

// Reads the percentage of an annotation.
func percentage(text string) (int, error) {
	percent, err := strconv.ParseUint(text, 10, 7)
	if err != nil || percent > 100 {
		return 0, fmt.Errorf("%s is %s, not a whole number from 0 to 100", abKey, quoted(text))
	}
	return int(percent), nil
}

// Names the ReplicaSet, StatefulSet, DaemonSet or Job of a pod. NRI does not tell it, and controllers name pods
// OWNER-SUFFIX; those of an indexed Job have the index too, and a label.
func owner(pod *api.PodSandbox) string {
	name := pod.GetName()
	if at := strings.LastIndexByte(name, '-'); at > 0 {
		name = name[:at]
	}
	if job := pod.GetLabels()["batch.kubernetes.io/job-name"]; job != "" {
		name = job
	}
	return pod.GetNamespace() + "/" + name
}
