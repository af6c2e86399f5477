package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/plugin"
)

// Annotations of pods.
const (
	// A profile, for all containers of the pod.
	memoryKey = "jumbo.dev/memory"
	// A profile for one container, by NRI's convention: memory.jumbo.dev/container.NAME.
	containerKey = "memory.jumbo.dev"
	// The percentage of an owner's pods that are covered.
	abKey = "jumbo.dev/ab"
)

// Set in containers of an experiment: an annotation for tools of the runtime, a variable for the program and its metrics.
const (
	armKey      = "jumbo.dev/arm"
	armVariable = "JUMBO_ARM"
)

// Words for the two arms.
const (
	coveredArm = "covered"
	plainArm   = "plain"
)

const (
	// The profile for names that are unknown.
	fallback = "default"
	// The value of memoryKey that leaves a container alone.
	off = "off"
)

// Plugin decides for each container. The runtime may call its handlers at the same time.
type Plugin struct {
	mutex  sync.Mutex
	source source
	arms   arms
	// Tells that the arms have changed.
	changed chan struct{}
}

func newPlugin(cdi, node string) *Plugin {
	return &Plugin{
		source:  source{path: cdi},
		arms:    arms{node: node, pods: map[string]member{}},
		changed: make(chan struct{}, 1),
	}
}

// CreateContainer covers a container whose pod requests it.
func (p *Plugin) CreateContainer(
	ctx context.Context, pod *api.PodSandbox, container *api.Container,
) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	profile, ok := plugin.GetEffectiveAnnotation(pod, containerKey, container.GetName())
	if !ok {
		profile, ok = pod.GetAnnotations()[memoryKey]
	}
	if !ok || profile == off {
		return nil, nil, nil
	}
	name := fmt.Sprintf("%s/%s/%s", pod.GetNamespace(), pod.GetName(), container.GetName())
	adjust, err := p.adjust(ctx, name, profile, pod, container)
	if err != nil {
		log.Warnf(ctx, "%s starts plain: %v", name, err)
	}
	return adjust, nil, nil
}

// Returns the changes of a container, or the reason why there is none.
func (p *Plugin) adjust(
	ctx context.Context, name, profile string, pod *api.PodSandbox, container *api.Container,
) (*api.ContainerAdjustment, error) {
	share, isExperiment := pod.GetAnnotations()[abKey]
	percent := 100
	if isExperiment {
		var err error
		if percent, err = percentage(share); err != nil {
			return nil, err
		}
	}
	if err := unfit(container); err != nil {
		return nil, err
	}

	p.mutex.Lock()
	defer p.mutex.Unlock()
	facts, err := p.source.current()
	if err != nil {
		return nil, err
	}
	ours, isKnown := facts.profiles[profile]
	if !isKnown {
		log.Warnf(ctx, "%s: no profile %s; %q takes its place", name, quoted(profile), fallback)
		profile = fallback
		ours = facts.profiles[fallback]
	}

	// Last: in both arms are only containers that could be covered.
	adjust := &api.ContainerAdjustment{}
	if isExperiment {
		member := p.arms.assign(pod, percent)
		arm := member.arm()
		p.tell()
		adjust.AddAnnotation(armKey, arm)
		adjust.AddEnv(armVariable, arm)
		log.Infof(ctx, "%s: arm %s of %s", name, arm, member.owner)
		if !member.isCovered {
			return adjust, nil
		}
	}
	adjust.AddAnnotation(memoryKey, profile)
	adjust.AddMount(facts.mount)
	merge(adjust, container.GetEnv(), facts.entry, ours)
	// NRI before 0.10 tells neither; nor does a runtime where the pod names no profile.
	seccomp := ""
	if linux := container.GetLinux(); linux.GetSeccompProfile() == nil && linux.GetSeccompPolicy() == nil {
		seccomp = "; the runtime does not tell its seccomp profile"
	}
	log.Infof(ctx, "%s: covered by profile %q%s", name, profile, seccomp)
	return adjust, nil
}

// The reason why a container cannot be covered.
func unfit(container *api.Container) error {
	if kills(container.GetLinux().GetSeccompPolicy()) {
		return errors.New("its seccomp profile kills for madvise(2), or by default")
	}
	if value, _ := variable(container.GetEnv(), "JUMBO"); value == off {
		return errors.New("it has JUMBO=off")
	}
	// By its image, a CDI device, an admission policy, or a second plugin of this kind.
	for _, name := range []string{"JUMBO_ORDERS", armVariable} {
		if _, ok := variable(container.GetEnv(), name); ok {
			return fmt.Errorf("it has %s already", name)
		}
	}
	return nil
}

// Synchronize rebuilds the arms from the annotations of containers, after a start of the plugin or the runtime.
func (p *Plugin) Synchronize(
	ctx context.Context, pods []*api.PodSandbox, containers []*api.Container,
) ([]*api.ContainerUpdate, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	there := map[string]*api.PodSandbox{}
	found := map[string]member{}
	for _, pod := range pods {
		there[pod.GetId()] = pod
		// A container that is being created is in no list yet, and a runtime lists none that has ended.
		if known, ok := p.arms.pods[pod.GetId()]; ok {
			found[pod.GetId()] = known
		}
	}
	for _, container := range containers {
		pod, arm := there[container.GetPodSandboxId()], container.GetAnnotations()[armKey]
		if pod != nil && (arm == coveredArm || arm == plainArm) {
			found[pod.GetId()] = newMember(pod, arm == coveredArm)
		}
	}
	p.arms.pods = found
	p.tell()
	log.Infof(ctx, "%d pods, of which %d are in experiments", len(pods), len(found))
	return nil, nil
}

// StopPodSandbox lets the pod's arm go.
func (p *Plugin) StopPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	delete(p.arms.pods, pod.GetId())
	p.tell()
	return nil
}

// RemovePodSandbox lets the pod's arm go, where the plugin was away when the pod stopped.
func (p *Plugin) RemovePodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.StopPodSandbox(ctx, pod)
}

// Marks the arms as changed, and waits for no reader.
func (p *Plugin) tell() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

// A user's text for the log: one line, and not long.
func quoted(text string) string {
	const most = 64
	if len(text) > most {
		text = text[:most] + "..."
	}
	return strconv.Quote(text)
}
