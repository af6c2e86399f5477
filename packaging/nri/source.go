package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/nri/pkg/api"
)

// The specification of `jumbo cdi generate`, read again when it has changed.
type source struct {
	path  string
	seen  os.FileInfo
	facts *facts
}

// The parts of a specification that containers need.
type facts struct {
	// Variables of each profile, as NAME=VALUE.
	profiles map[string][]string
	// The folder of the library.
	mount *api.Mount
	// The entry of LD_PRELOAD.
	entry string
	// The library on the host.
	file string
}

// The fields of a CDI specification that are read.
type specification struct {
	Kind    string
	Devices []struct {
		Name           string
		ContainerEdits struct{ Env []string }
	}
	ContainerEdits struct {
		Mounts []struct {
			HostPath, ContainerPath string
			Options                 []string
		}
	}
}

const (
	kind = "jumbo.dev/memory"
	// The file in which a CDI device names the library.
	preloads = "/etc/ld.so.preload"
	generate = "hint: sudo jumbo cdi generate"
)

// Returns the facts of now. The library is there: a mount of a missing folder would fail the container.
func (s *source) current() (*facts, error) {
	found, err := os.Stat(s.path)
	if err != nil {
		return nil, fmt.Errorf("no specification: %w; %s", err, generate)
	}
	isSame := s.seen != nil && os.SameFile(found, s.seen) && found.ModTime().Equal(s.seen.ModTime()) && found.Size() == s.seen.Size()
	if !isSame {
		s.seen = nil
		if s.facts, err = read(s.path); err != nil {
			return nil, fmt.Errorf("cannot use %s: %w; %s", s.path, err, generate)
		}
		s.seen = found
	}
	if _, err := os.Stat(s.facts.file); err != nil {
		return nil, fmt.Errorf("no library: %w; %s", err, generate)
	}
	return s.facts, nil
}

func read(path string) (*facts, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var found specification
	if err := json.Unmarshal(text, &found); err != nil {
		return nil, err
	}
	if found.Kind != kind {
		return nil, fmt.Errorf("it has devices %q, not %q", found.Kind, kind)
	}
	facts := facts{profiles: map[string][]string{}}
	for _, device := range found.Devices {
		facts.profiles[device.Name] = device.ContainerEdits.Env
	}
	if _, ok := facts.profiles[fallback]; !ok {
		return nil, fmt.Errorf("it has no device %q", fallback)
	}
	names := ""
	for _, mount := range found.ContainerEdits.Mounts {
		if mount.ContainerPath == preloads {
			names = mount.HostPath
			continue
		}
		facts.mount = &api.Mount{
			Destination: mount.ContainerPath, Type: "bind", Source: mount.HostPath, Options: mount.Options,
		}
	}
	if facts.mount == nil || names == "" {
		return nil, errors.New("it does not mount the library")
	}
	text, err = os.ReadFile(names)
	if err != nil {
		return nil, err
	}
	for _, name := range strings.Fields(string(text)) {
		if strings.HasPrefix(name, facts.mount.Destination+"/") {
			// glibc expands both forms. musl opens the name as it is, and the folder has a `$LIB`, but no `${LIB}`.
			facts.entry = strings.Replace(name, "$LIB", "${LIB}", 1)
			facts.file = filepath.Join(facts.mount.Source, filepath.Base(name))
		}
	}
	if facts.entry == "" {
		return nil, fmt.Errorf("%s does not name the library", names)
	}
	return &facts, nil
}
