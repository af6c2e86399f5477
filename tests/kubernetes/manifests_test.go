package kubernetes

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	beta "k8s.io/api/admissionregistration/v1beta1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/mutating"
	"k8s.io/apiserver/pkg/admission/plugin/policy/mutating/patch"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	registration "k8s.io/kubernetes/pkg/apis/admissionregistration"
	_ "k8s.io/kubernetes/pkg/apis/admissionregistration/install"
	"k8s.io/kubernetes/pkg/apis/admissionregistration/validation"
	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

const image = "registry.example.com/jumbo-library:0.1.0"

// file is the path of a file of packaging/kubernetes.
func file(names ...string) string {
	return filepath.Join(append([]string{"..", "..", "packaging", "kubernetes"}, names...)...)
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// decode parses the objects of a manifest. An unknown field is an error.
func decode(t testing.TB, manifest []byte) []runtime.Object {
	t.Helper()
	decoder := serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(manifest)))
	var objects []runtime.Object
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(bytes.TrimSpace(document)) == 0 {
			continue
		}
		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		objects = append(objects, object)
	}
}

// byKustomize is the output of `kubectl kustomize FOLDER`.
func byKustomize(t testing.TB, folder string) []runtime.Object {
	t.Helper()
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), folder)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := resources.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return decode(t, manifest)
}

// installed is the result of docs/kubernetes.md: an overlay that names the image.
func installed(t testing.TB) []runtime.Object {
	t.Helper()
	document := read(t, filepath.Join("..", "..", "docs", "kubernetes.md"))
	overlay := regexp.MustCompile("(?s)```yaml\n([^`]*kind: Kustomization\n.*?)```").FindSubmatch(document)
	if overlay == nil {
		t.Fatal("docs/kubernetes.md has no overlay")
	}
	folder, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	base, err := filepath.Abs(file())
	if err != nil {
		t.Fatal(err)
	}
	base, err = filepath.Rel(folder, base)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(overlay[1]), "../jumbo/packaging/kubernetes", base, 1)
	if err := os.WriteFile(filepath.Join(folder, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return byKustomize(t, folder)
}

func byHelm(t *testing.T, values map[string]any) ([]byte, error) {
	t.Helper()
	chart, err := loader.Load(file("chart"))
	if err != nil {
		t.Fatal(err)
	}
	all, err := util.ToRenderValues(chart, values, common.ReleaseOptions{Name: "jumbo", Namespace: "default"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	rendered, err := engine.Render(chart, all)
	var manifest []byte
	for _, text := range rendered {
		manifest = append(manifest, text...)
	}
	return manifest, err
}

func TestChartAndKustomizationAreTheSame(t *testing.T) {
	manifest, err := byHelm(t, map[string]any{"image": image})
	if err != nil {
		t.Fatal(err)
	}
	helm, kustomize := decode(t, manifest), installed(t)
	if len(helm) != 2 || !equality.Semantic.DeepEqual(helm, kustomize) {
		t.Errorf("the chart has\n%v\nand the kustomization\n%v", helm, kustomize)
	}
	if equality.Semantic.DeepEqual(byKustomize(t, file()), kustomize) {
		t.Error("the overlay changes nothing")
	}
	_, err = byHelm(t, nil)
	if err == nil || !strings.Contains(err.Error(), "--set image=") {
		t.Errorf("the chart without an image: %v", err)
	}
}

func TestAnApiServerTakesThePolicy(t *testing.T) {
	for _, object := range append(installed(t), byKustomize(t, file())...) {
		legacyscheme.Scheme.Default(object)
		inner, err := legacyscheme.Scheme.UnsafeConvertToVersion(object, registration.SchemeGroupVersion)
		if err != nil {
			t.Fatal(err)
		}
		switch inner := inner.(type) {
		case *registration.MutatingAdmissionPolicy:
			err = validation.ValidateMutatingAdmissionPolicy(inner).ToAggregate()
		case *registration.MutatingAdmissionPolicyBinding:
			err = validation.ValidateMutatingAdmissionPolicyBinding(inner).ToAggregate()
		default:
			t.Errorf("a %T", inner)
		}
		if err != nil {
			t.Error(err)
		}
	}
}

// An API server of 1.34 has the beta, and accepts the expressions of 1.33.
func TestTheBetaHasTheSameFieldsAndExpressions(t *testing.T) {
	text := strings.ReplaceAll(string(read(t, file("chart", "policy.yaml"))), "admissionregistration.k8s.io/v1", beta.SchemeGroupVersion.String())
	spec := decode(t, []byte(text))[0].(*beta.MutatingAdmissionPolicy).Spec
	compiler, err := cel.NewCompositedCompiler(environment.MustBaseEnvSet(version.MajorMinor(1, 33)))
	if err != nil {
		t.Fatal(err)
	}
	options := cel.OptionalVariableDeclarations{HasAuthorizer: true}
	for _, each := range spec.Variables {
		variable := &mutating.Variable{Name: each.Name, Expression: each.Expression}
		if found := compiler.CompileAndStoreVariable(variable, options, environment.NewExpressions); found.Error != nil {
			t.Errorf("%s: %v", each.Name, found.Error)
		}
	}
	options.HasPatchTypes = true
	mutation := &patch.JSONPatchCondition{Expression: spec.Mutations[0].JSONPatch.Expression}
	for _, err := range compiler.CompileMutatingEvaluator(mutation, options, environment.NewExpressions).CompilationErrors() {
		t.Error(err)
	}
}
