package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A specification as `jumbo cdi generate` writes it, and the files that it names.
func specify(t testing.TB, folder string) string {
	library := filepath.Join(folder, "1.0")
	put(t, filepath.Join(library, "libjumbo_preload.so"), "")
	put(t, filepath.Join(library, "ld.so.preload"), "/opt/other.so\n/usr/lib/jumbo/1.0/$LIB/libjumbo_preload.so\n")
	path := filepath.Join(folder, "jumbo.json")
	put(t, path, fmt.Sprintf(`{"cdiVersion": "0.5.0", "kind": "jumbo.dev/memory", "devices": [
		{"name": "default", "containerEdits": {"env": ["JUMBO_ORDERS=heap=1"]}},
		{"name": "node", "containerEdits": {"env": ["JUMBO_ORDERS=text=file"]}}
	], "containerEdits": {"mounts": [
		{"hostPath": "%[1]s", "containerPath": "/usr/lib/jumbo/1.0", "options": ["ro", "bind"]},
		{"hostPath": "%[1]s/ld.so.preload", "containerPath": "/etc/ld.so.preload", "options": ["ro", "bind"]}
	]}}`, library))
	return path
}

// Writes a file as jumbo does, by a rename.
func put(t testing.TB, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func TestFactsComeFromTheSpecification(t *testing.T) {
	path := specify(t, t.TempDir())
	source := source{path: path}
	facts, err := source.current()
	if err != nil {
		t.Fatal(err)
	}
	if facts.entry != "/usr/lib/jumbo/1.0/${LIB}/libjumbo_preload.so" || len(facts.profiles) != 2 ||
		facts.mount.Source != filepath.Join(filepath.Dir(path), "1.0") || strings.Join(facts.mount.Options, ",") != "ro,bind" {
		t.Errorf("%+v", facts)
	}
	if again, err := source.current(); again != facts || err != nil {
		t.Errorf("it was read again, unchanged: %v", err)
	}
}

func TestAChangedSpecificationIsReadAgain(t *testing.T) {
	path := specify(t, t.TempDir())
	source := source{path: path}
	expect := func(text string) {
		t.Helper()
		facts, err := source.current()
		if (text == "") != (err == nil) || (err != nil && !strings.Contains(err.Error(), text)) {
			t.Errorf("%v, not %q", err, text)
		}
		if (err == nil) != (facts != nil) {
			t.Errorf("%v beside %v", facts, err)
		}
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	library := filepath.Join(filepath.Dir(path), "1.0", "libjumbo_preload.so")
	expect("")
	for text, reason := range map[string]string{
		"":                             "JSON",
		"[]":                           "cannot unmarshal",
		"null":                         `devices ""`,
		`{"kind": "vendor.com/gpu"}`:   "vendor.com/gpu",
		`{"kind": "jumbo.dev/memory"}`: "no device",
		`{"kind": "jumbo.dev/memory", "devices": [{"name": "default"}]}`:      "does not mount",
		string(whole[:len(whole)-1]):                                          "JSON",
		strings.ReplaceAll(string(whole), "/usr/lib/jumbo/1.0", "/elsewhere"): "does not name the library",
	} {
		put(t, path, text)
		expect(reason)
	}
	put(t, path, string(whole))
	expect("")
	if err := os.Remove(library); err != nil {
		t.Fatal(err)
	}
	expect("no library")
	put(t, library, "")
	expect("")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	expect("no specification")
}
