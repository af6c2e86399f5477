// Command jumbo-nri covers containers with jumbo: a plugin of the Node Resource Interface (NRI) of containerd and CRI-O.
//
//   - [Plugin]: the decision for each container.
//   - [source]: the specification of `jumbo cdi generate`, where all facts about the library come from.
//   - [arms]: the arms of experiments, and [Plugin.export] their metric.
//
// Invariant: no handler returns an error, because the runtime fails the container then. Where the plugin cannot help, the
// container starts as it would without it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/stub"
)

// The pause between two attempts to reach the runtime.
const retry = time.Second

func main() {
	host, _ := os.Hostname()
	if name := os.Getenv("NODE_NAME"); name != "" {
		host = name
	}
	cdi := flag.String("cdi", "/etc/cdi/jumbo.json", "`FILE` that jumbo cdi generate wrote")
	socket := flag.String("socket", api.DefaultSocketPath, "`FILE` of the runtime's socket")
	// Late, so that the plugin sees the variables that others set.
	index := flag.String("idx", "90", "place among the runtime's plugins, two `DIGITS`")
	node := flag.String("node", host, "`NAME` from which the arm of an owner's first pod follows; $NODE_NAME comes before the host's name")
	textfile := flag.String("textfile", "", "write the arm of each pod to `FILE`, for node_exporter's textfile collector")
	flag.Parse()
	if err := api.CheckPluginIndex(*index); err != nil || flag.NArg() > 0 {
		fmt.Fprintln(flag.CommandLine.Output(), "jumbo-nri takes options alone, and -idx two digits")
		flag.Usage()
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	plugin := newPlugin(*cdi, *node)
	if _, err := plugin.source.current(); err != nil {
		log.Warnf(ctx, "containers start plain: %v", err)
	}
	if *textfile != "" {
		go plugin.export(ctx, *textfile)
	}
	run(ctx, plugin, *socket, *index)
}

// Serves the runtime until the context ends, over its restarts.
func run(ctx context.Context, plugin *Plugin, socket, index string) {
	last := ""
	for ctx.Err() == nil {
		err := serve(ctx, plugin, socket, index)
		// One line, however long the runtime is away.
		if err != nil && err.Error() != last {
			log.Warnf(ctx, "%v; trying again each %v", err, retry)
		}
		last = ""
		if err != nil {
			last = err.Error()
		}
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
}

// Registers the plugin with the runtime, and returns when the connection is gone.
func serve(ctx context.Context, plugin *Plugin, socket, index string) error {
	// A stub that failed to start keeps its connection, so each attempt has a stub of its own.
	connection, err := net.Dial("unix", socket)
	if err != nil {
		return fmt.Errorf("no runtime: %w; hint: start it, and enable NRI in its configuration", err)
	}
	defer connection.Close()
	closed := make(chan struct{})
	link, err := stub.New(plugin, stub.WithPluginName("jumbo"), stub.WithPluginIdx(index),
		stub.WithConnection(connection), stub.WithOnClose(func() { close(closed) }))
	if err != nil {
		return err
	}
	started := make(chan error, 1)
	go func() { started <- link.Start(ctx) }()
	select {
	case err = <-started:
	case <-time.After(2 * stub.DefaultRegistrationTimeout):
		// The stub waits without a bound for the runtime's configuration, and cannot be stopped then.
		log.Errorf(ctx, "the runtime at %s did not configure the plugin; exiting, to be started again", socket)
		os.Exit(1)
	}
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		link.Stop()
		return nil
	case <-closed:
		return errors.New("the runtime closed the connection")
	}
}
