package kubernetes

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionregistration "k8s.io/api/admissionregistration/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/apiserver/pkg/admission/plugin/policy/mutating"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/util/compatibility"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/discovery"
	dynamic "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/openapi"
	"k8s.io/client-go/openapi/openapitest"
	"k8s.io/client-go/restmapper"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	podutil "k8s.io/kubernetes/pkg/api/pod"
	internal "k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	"k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/utils/ptr"
)

// cluster is the admission of an API server, with the policies of its objects. It is Kubernetes'
// own code: the plugin with its matching, CEL and patches, called again according to its
// reinvocation policy.
type cluster struct {
	admission.MutationInterface
}

// client is a fake one that knows the schemas of Kubernetes' own types.
type client struct{ *fake.Clientset }

type schemas struct{ discovery.DiscoveryInterfaces }

func (c client) Discovery() discovery.DiscoveryInterfaces { return schemas{c.Clientset.Discovery()} }

func (schemas) OpenAPIV3() openapi.Client {
	folder, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes").Output()
	if err != nil {
		panic(fmt.Sprintf("cannot tell where the source of Kubernetes is: %v", err))
	}
	return openapitest.NewFileClient(filepath.Join(strings.TrimSpace(string(folder)), "api", "openapi-spec", "v3"))
}

type noConfiguration struct{}

func (noConfiguration) ConfigFor(string) (io.Reader, error) { return nil, nil }

// covering is a cluster with the policy. Its errors fail the test: ignored, they would pass for
// pods that must stay plain.
func covering(t testing.TB, others ...runtime.Object) cluster {
	t.Helper()
	return newCluster(t, append(strict(installed(t)), others...)...)
}

func strict(objects []runtime.Object) []runtime.Object {
	for _, object := range objects {
		if policy, ok := object.(*admissionregistration.MutatingAdmissionPolicy); ok {
			policy.Spec.FailurePolicy = ptr.To(admissionregistration.Fail)
		}
	}
	return objects
}

func newCluster(t testing.TB, objects ...runtime.Object) cluster {
	t.Helper()
	for _, name := range []string{"default", "kube-system"} {
		labels := map[string]string{core.LabelMetadataName: name}
		objects = append(objects, &core.Namespace{ObjectMeta: meta.ObjectMeta{Name: name, Labels: labels}})
	}
	// Tells the test when the plugin has read the policies.
	objects = append(objects, policyThat("ready", `Object{metadata: Object.metadata{labels: {"ready": "yes"}}}`)...)
	for _, object := range objects {
		legacyscheme.Scheme.Default(object)
	}
	var native kubernetes.Interface = client{fake.NewClientset(objects...)}
	shared := informers.NewSharedInformerFactory(native, 0)
	plugins := admission.NewPlugins()
	mutating.Register(plugins)
	handler, err := plugins.NewFromPlugins([]string{mutating.PluginName}, noConfiguration{}, initializer.New(
		native,
		dynamic.NewSimpleDynamicClient(scheme.Scheme),
		shared,
		authorizerfactory.NewAlwaysAllowAuthorizer(),
		utilfeature.DefaultFeatureGate,
		compatibility.DefaultBuildEffectiveVersion(),
		t.Context().Done(),
		restmapper.NewDiscoveryRESTMapper(nil),
	), nil)
	if err != nil {
		t.Fatal(err)
	}
	shared.Start(t.Context().Done())
	shared.WaitForCacheSync(t.Context().Done())
	c := cluster{handler.(admission.MutationInterface)}
	var last error
	err = wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		pod := podOf(func(pod *core.Pod) { pod.Labels = nil })
		// Until the plugin has read the schemas, it refuses all requests.
		last = c.admit(pod, nil)
		return last == nil && pod.Labels["ready"] == "yes", nil
	})
	if err != nil {
		t.Fatalf("the policies are not there after one minute: %v, %v", err, last)
	}
	return c
}

// admit changes pod as the API server does: defaults, admission, validation. An old pod makes it an
// update of its ephemeral containers.
func (c cluster) admit(pod, old *core.Pod) error {
	legacyscheme.Scheme.Default(pod)
	var after, before internal.Pod
	if err := legacyscheme.Scheme.Convert(pod, &after, nil); err != nil {
		return err
	}
	operation, subresource, oldObject := admission.Create, "", runtime.Object(nil)
	if old != nil {
		if err := legacyscheme.Scheme.Convert(old, &before, nil); err != nil {
			return err
		}
		operation, subresource, oldObject = admission.Update, "ephemeralcontainers", &before
	}
	attributes := admission.NewAttributesRecord(&after, oldObject, core.SchemeGroupVersion.WithKind("Pod"), pod.Namespace,
		pod.Name, core.SchemeGroupVersion.WithResource("pods"), subresource, operation, nil, false, nil)
	interfaces := admission.NewObjectInterfacesFromScheme(legacyscheme.Scheme)
	if err := c.Admit(context.Background(), attributes, interfaces); err != nil {
		return err
	}
	errors := validation.ValidatePodCreate(&after, options(&after))
	if old != nil {
		errors = validation.ValidatePodEphemeralContainersUpdate(&after, &before, options(&after))
	}
	if err := errors.ToAggregate(); err != nil {
		return err
	}
	*pod = core.Pod{}
	return legacyscheme.Scheme.Convert(&after, pod, nil)
}

func options(pod *internal.Pod) validation.PodValidationOptions {
	return podutil.GetValidationOptionsFromPodSpecAndMeta(&pod.Spec, nil, &pod.ObjectMeta, nil)
}

// policyThat applies expression to all pods; its binding is with it.
func policyThat(name, expression string) []runtime.Object {
	return []runtime.Object{
		&admissionregistration.MutatingAdmissionPolicy{
			ObjectMeta: meta.ObjectMeta{Name: name},
			Spec: admissionregistration.MutatingAdmissionPolicySpec{
				ReinvocationPolicy: admissionregistration.IfNeededReinvocationPolicy,
				MatchConstraints: &admissionregistration.MatchResources{
					ResourceRules: []admissionregistration.NamedRuleWithOperations{{RuleWithOperations: admissionregistration.RuleWithOperations{
						Operations: []admissionregistration.OperationType{admissionregistration.Create},
						Rule:       admissionregistration.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
					}}},
				},
				Mutations: []admissionregistration.Mutation{{
					PatchType:          admissionregistration.PatchTypeApplyConfiguration,
					ApplyConfiguration: &admissionregistration.ApplyConfiguration{Expression: expression},
				}},
			},
		},
		&admissionregistration.MutatingAdmissionPolicyBinding{
			ObjectMeta: meta.ObjectMeta{Name: name},
			Spec:       admissionregistration.MutatingAdmissionPolicyBindingSpec{PolicyName: name},
		},
	}
}
