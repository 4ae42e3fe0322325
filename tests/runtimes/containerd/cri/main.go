// Sends the kubelet's requests to a container runtime, faster than crictl: one process and one connection serve all
// requests, any number of them at the same time. Each line of standard input is a request as JSON. The program writes
// each answer to standard output as soon as it arrives.
//
// Usage: cri ENDPOINT
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

type request struct {
	ID int `json:"id"`
	// sandbox, create, start, stop, once (create, start, wait, remove), drop (stop and remove a sandbox), sandboxes
	// (their IDs) or netns (the path of a sandbox's network namespace)
	Op            string          `json:"op"`
	Sandbox       string          `json:"sandbox"`
	Container     string          `json:"container"`
	SandboxConfig json.RawMessage `json:"sandbox_config"`
	Config        json.RawMessage `json:"config"`
	Seconds       int64           `json:"seconds"`
}

type answer struct {
	ID        int    `json:"id"`
	Sandbox   string `json:"sandbox,omitempty"`
	Container string `json:"container,omitempty"`
	// How long the runtime took to answer StartContainer.
	StartMicroseconds int64    `json:"start_us"`
	Exit              int32    `json:"exit"`
	Sandboxes         []string `json:"sandboxes,omitempty"`
	Netns             string   `json:"netns,omitempty"`
	Error             string   `json:"error,omitempty"`
}

type client struct{ cri.RuntimeServiceClient }

func (c client) sandbox(ctx context.Context, r request, a *answer) error {
	config := &cri.PodSandboxConfig{}
	if err := protojson.Unmarshal(r.SandboxConfig, config); err != nil {
		return err
	}
	made, err := c.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	a.Sandbox = made.GetPodSandboxId()
	return err
}

func (c client) create(ctx context.Context, r request, a *answer) error {
	sandbox, config := &cri.PodSandboxConfig{}, &cri.ContainerConfig{}
	if err := protojson.Unmarshal(r.SandboxConfig, sandbox); err != nil {
		return err
	}
	if err := protojson.Unmarshal(r.Config, config); err != nil {
		return err
	}
	made, err := c.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: r.Sandbox, Config: config, SandboxConfig: sandbox})
	a.Container = made.GetContainerId()
	return err
}

func (c client) start(ctx context.Context, id string, a *answer) error {
	begin := time.Now()
	_, err := c.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: id})
	a.StartMicroseconds = time.Since(begin).Microseconds()
	return err
}

// Waits for the container's end; the context has a deadline.
func (c client) wait(ctx context.Context, id string, a *answer) error {
	for {
		status, err := c.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})
		if err != nil {
			return err
		}
		if status.Status.State == cri.ContainerState_CONTAINER_EXITED {
			a.Exit = status.Status.ExitCode
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("container %s: expected it to exit: %w", id, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (c client) remove(ctx context.Context, id string) error {
	_, err := c.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: id})
	return err
}

func (c client) once(ctx context.Context, r request, a *answer) error {
	err := c.create(ctx, r, a)
	if err == nil {
		err = c.start(ctx, a.Container, a)
	}
	if err == nil {
		err = c.wait(ctx, a.Container, a)
	}
	if a.Container != "" {
		if removed := c.remove(ctx, a.Container); err == nil {
			err = removed
		}
	}
	return err
}

func (c client) sandboxes(ctx context.Context, a *answer) error {
	list, err := c.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	for _, sandbox := range list.GetItems() {
		a.Sandboxes = append(a.Sandboxes, sandbox.Id)
	}
	return err
}

// The runtimes have it in the runtime specification of the sandbox.
func (c client) netns(ctx context.Context, id string, a *answer) error {
	status, err := c.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	if err != nil {
		return err
	}
	var info struct {
		RuntimeSpec struct {
			Linux struct{ Namespaces []struct{ Type, Path string } }
		}
	}
	if err := json.Unmarshal([]byte(status.Info["info"]), &info); err != nil {
		return err
	}
	for _, namespace := range info.RuntimeSpec.Linux.Namespaces {
		if namespace.Type == "network" {
			a.Netns = namespace.Path
			return nil
		}
	}
	return fmt.Errorf("sandbox %s: no network namespace in %s", id, status.Info["info"])
}

func (c client) do(r request) answer {
	a := answer{ID: r.ID, Container: r.Container, Sandbox: r.Sandbox}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var err error
	switch r.Op {
	case "sandbox":
		err = c.sandbox(ctx, r, &a)
	case "create":
		err = c.create(ctx, r, &a)
	case "start":
		err = c.start(ctx, r.Container, &a)
	case "stop":
		_, err = c.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: r.Container, Timeout: r.Seconds})
	case "once":
		err = c.once(ctx, r, &a)
	case "drop":
		if _, err = c.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: r.Sandbox}); err == nil {
			_, err = c.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: r.Sandbox})
		}
	case "sandboxes":
		err = c.sandboxes(ctx, &a)
	case "netns":
		err = c.netns(ctx, r.Sandbox, &a)
	default:
		err = fmt.Errorf("unknown request %q", r.Op)
	}
	if err != nil {
		a.Error = err.Error()
	}
	return a
}

func main() {
	connection, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Fprintln(os.Stderr, "cri:", err)
		os.Exit(1)
	}
	c := client{cri.NewRuntimeServiceClient(connection)}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	var output sync.Mutex
	var running sync.WaitGroup
	for lines.Scan() {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			fmt.Fprintln(os.Stderr, "cri: invalid request:", err)
			os.Exit(2)
		}
		running.Add(1)
		go func() {
			defer running.Done()
			line, _ := json.Marshal(c.do(r))
			output.Lock()
			defer output.Unlock()
			fmt.Println(string(line))
		}()
	}
	running.Wait()
}
