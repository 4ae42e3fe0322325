// Injector sends pods through the webhook of Istio's injector and writes the injected pods, without volumes.
//
// Usage: PLATFORM=openshift injector MANIFESTS NAMESPACES < PODS > INJECTED
//
// MANIFESTS is Istio's chart istiod, rendered. It contains the injector's configuration: the ConfigMaps istio and
// istio-sidecar-injector.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"

	jsonpatch "github.com/evanphx/json-patch/v5"
	admission "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	syaml "sigs.k8s.io/yaml"

	"istio.io/istio/pilot/pkg/model"
	"istio.io/istio/pkg/config/constants"
	"istio.io/istio/pkg/config/mesh"
	"istio.io/istio/pkg/config/mesh/meshwatcher"
	"istio.io/istio/pkg/kube"
	"istio.io/istio/pkg/kube/inject"
	"istio.io/istio/pkg/kube/multicluster"
	"istio.io/istio/pkg/log"
)

func main() {
	options := log.DefaultOptions()
	options.OutputPaths = []string{"stderr"}
	if err := log.Configure(options); err != nil {
		panic(err)
	}
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "injector: expected MANIFESTS and NAMESPACES")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "injector:", err)
		os.Exit(1)
	}
}

// configuration is the injector's configuration. It never changes.
type configuration struct {
	config inject.Config
	values string
}

func (c *configuration) Run(<-chan struct{})                           {}
func (c *configuration) SetHandler(func(*inject.Config, string) error) {}
func (c *configuration) Get() (*inject.Config, string, error)          { return &c.config, c.values, nil }

// documents decodes all documents of a stream of YAML.
func documents[T any](reader io.Reader) ([]T, error) {
	decoder := yaml.NewYAMLOrJSONDecoder(reader, 4096)
	var all []T
	for {
		var one T
		if err := decoder.Decode(&one); err == io.EOF {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
}

// file decodes all documents of a file.
func file[T any](path string) ([]T, error) {
	opened, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer opened.Close()
	return documents[T](opened)
}

func run(configMaps, namespaces string) error {
	maps, err := file[corev1.ConfigMap](configMaps)
	if err != nil {
		return err
	}
	watcher, meshConfig := &configuration{}, mesh.DefaultMeshConfig()
	for _, one := range maps {
		switch {
		case one.Kind != "ConfigMap":
		case one.Data["config"] != "":
			if watcher.config, err = inject.UnmarshalConfig([]byte(one.Data["config"])); err != nil {
				return err
			}
			watcher.values = one.Data["values"]
		case one.Data["mesh"] != "":
			if meshConfig, err = mesh.ApplyMeshConfigDefaults(one.Data["mesh"]); err != nil {
				return err
			}
		}
	}
	known, err := file[*corev1.Namespace](namespaces)
	if err != nil {
		return err
	}
	client := kube.NewFakeClient(objects(known)...)
	clusters, stop := multicluster.NewFakeController(), make(chan struct{})
	environment := model.Environment{Watcher: meshwatcher.NewTestWatcher(meshConfig), ConfigStore: model.NewFakeStore()}
	environment.SetPushContext(&model.PushContext{ProxyConfigs: model.GetProxyConfigs(environment.ConfigStore, meshConfig)})
	mux := http.NewServeMux()
	if _, err = inject.NewWebhook(inject.WebhookParameters{
		Watcher: watcher, Env: &environment, Mux: mux, Revision: "default", MultiCluster: clusters,
	}); err != nil {
		return err
	}
	clusters.Add(constants.DefaultClusterName, client, stop)
	client.RunAndWait(stop)
	pods, err := documents[corev1.Pod](os.Stdin)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		injected, err := review(mux, pod)
		if err != nil {
			return fmt.Errorf("%s: %w", pod.Name, err)
		}
		fmt.Printf("---\n%s", injected)
	}
	return nil
}

// objects converts the namespaces for the client.
func objects(namespaces []*corev1.Namespace) []runtime.Object {
	var all []runtime.Object
	for _, one := range namespaces {
		all = append(all, one)
	}
	return all
}

// review returns the pod that the API server would store.
func review(mux *http.ServeMux, pod corev1.Pod) ([]byte, error) {
	raw, err := json.Marshal(pod)
	if err != nil {
		return nil, err
	}
	body, err := json.Marshal(admission.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request:  &admission.AdmissionRequest{UID: "1", Namespace: pod.Namespace, Object: runtime.RawExtension{Raw: raw}},
	})
	if err != nil {
		return nil, err
	}
	request := httptest.NewRequest(http.MethodPost, "/inject", bytes.NewReader(body))
	request.Header.Set("Content-Type", "application/json")
	recorder := httptest.NewRecorder()
	mux.ServeHTTP(recorder, request)
	var answer admission.AdmissionReview
	if err := json.Unmarshal(recorder.Body.Bytes(), &answer); err != nil {
		return nil, fmt.Errorf("%d: %s", recorder.Code, recorder.Body)
	}
	if answer.Response.Result != nil {
		return nil, fmt.Errorf("%s", answer.Response.Result.Message)
	}
	if answer.Response.Patch != nil {
		patch, err := jsonpatch.DecodePatch(answer.Response.Patch)
		if err != nil {
			return nil, err
		}
		if raw, err = patch.Apply(raw); err != nil {
			return nil, err
		}
	}
	return withoutVolumes(raw)
}

func withoutVolumes(raw []byte) ([]byte, error) {
	var pod corev1.Pod
	if err := json.Unmarshal(raw, &pod); err != nil {
		return nil, err
	}
	pod.Spec.Volumes = nil
	for _, list := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range list {
			list[i].VolumeMounts = nil
		}
	}
	return syaml.Marshal(pod)
}
