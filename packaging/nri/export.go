package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/log"
)

// Writes the metric of the arms at each change, beside the path on which containers start.
func (p *Plugin) export(ctx context.Context, path string) {
	for range p.changed {
		p.mutex.Lock()
		text := p.arms.metric()
		p.mutex.Unlock()
		if err := replace(path, text); err != nil {
			log.Warnf(ctx, "no metrics: %v", err)
		}
	}
}

// Returns the arms in the text format of Prometheus. The labels are those by which metrics of pods are joined.
func (a *arms) metric() string {
	escape := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace
	var lines []string
	for _, pod := range a.pods {
		lines = append(lines, fmt.Sprintf("jumbo_arm_info{namespace=\"%s\",pod=\"%s\",arm=\"%s\"} 1\n",
			escape(pod.namespace), escape(pod.name), pod.arm()))
	}
	slices.Sort(lines)
	// A pod whose sandbox was made anew has two.
	lines = slices.Compact(lines)
	return "# HELP jumbo_arm_info Pods in an experiment (jumbo.dev/ab).\n# TYPE jumbo_arm_info gauge\n" + strings.Join(lines, "")
}

// Writes a file whole or not at all: the collector may read it now.
func replace(path, text string) error {
	// The collector reads names that end in .prom.
	whole := path + ".new"
	if err := os.WriteFile(whole, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(whole, path)
}
