// Nri-runtime is the runtime side of NRI without a container runtime: it serves the NRI socket with the library that
// containerd and CRI-O use.
//
// Usage: nri-runtime SOCKET PODS PADDING
//
// PODS is the number of pods that the runtime has, each with one container, and PADDING the size of each container's
// environment in bytes. Each line on stdin is a call, and its result is a line on stdout:
//
//	start ID [COUNT]   StartContainer, for COUNT containers one after another: "ok MEDIAN P99", in microseconds
//	post-start ID      PostStartContainer
//	stop ID            StopContainer
//	remove ID          RemoveContainer
//	create ID          CreateContainer
//	stop-pod ID        StopPodSandbox
//
// A line "synchronized" or "not synchronized: ERROR" follows each registration of a plugin.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
)

// Set by the linker.
var version string

func main() {
	if len(os.Args) == 2 && os.Args[1] == "--version" {
		fmt.Println("nri-runtime", version)
		return
	}
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "nri-runtime: expected SOCKET, PODS and PADDING")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "nri-runtime:", err)
		os.Exit(1)
	}
}

func run(socket, pods, padding string) error {
	count, err := strconv.Atoi(pods)
	if err != nil {
		return err
	}
	size, err := strconv.Atoi(padding)
	if err != nil {
		return err
	}
	// A busy machine needs seconds for a call.
	adaptation.SetPluginRegistrationTimeout(time.Minute)
	adaptation.SetPluginRequestTimeout(time.Minute)
	first := true
	synchronize := func(ctx context.Context, send adaptation.SyncCB) error {
		if first {
			// For the plugins that the runtime starts: there are none.
			first = false
			return nil
		}
		var all []*api.PodSandbox
		var containers []*api.Container
		for i := range count {
			id := fmt.Sprint("existing", i)
			all = append(all, podOf(id))
			containers = append(containers, containerOf(id, api.ContainerState_CONTAINER_RUNNING, size))
		}
		if _, err := send(ctx, all, containers); err != nil {
			fmt.Println("not synchronized:", err)
			return err
		}
		fmt.Println("synchronized")
		return nil
	}
	update := func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) { return nil, nil }
	runtime, err := adaptation.New("nri-runtime", version, synchronize, update,
		adaptation.WithSocketPath(socket), adaptation.WithPluginPath(socket+".plugins"),
		adaptation.WithPluginConfigPath(socket+".conf"))
	if err != nil {
		return err
	}
	if err := runtime.Start(); err != nil {
		return err
	}
	defer runtime.Stop()
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) < 2 {
			return fmt.Errorf("expected a call and an ID, got %q", lines.Text())
		}
		repeat := 1
		if len(words) > 2 {
			if repeat, err = strconv.Atoi(words[2]); err != nil {
				return err
			}
		}
		var times []int64
		for i := 0; i < repeat && err == nil; i++ {
			begin := time.Now()
			// Waits for a plugin that registers, as containerd does.
			blocked := runtime.BlockPluginSync()
			err = call(runtime, words[0], words[1])
			blocked.Unblock()
			times = append(times, time.Since(begin).Microseconds())
		}
		if err != nil {
			fmt.Println("error:", err)
			err = nil
			continue
		}
		slices.Sort(times)
		fmt.Println("ok", times[len(times)/2], times[len(times)*99/100])
	}
	return lines.Err()
}

func call(runtime *adaptation.Adaptation, method, id string) error {
	ctx, pod := context.Background(), podOf(id)
	container := containerOf(id, api.ContainerState_CONTAINER_CREATED, 0)
	var err error
	switch method {
	case "start":
		err = runtime.StartContainer(ctx, &adaptation.StartContainerRequest{Pod: pod, Container: container})
	case "post-start":
		err = runtime.PostStartContainer(ctx, &adaptation.PostStartContainerRequest{Pod: pod, Container: container})
	case "stop":
		_, err = runtime.StopContainer(ctx, &adaptation.StopContainerRequest{Pod: pod, Container: container})
	case "remove":
		err = runtime.RemoveContainer(ctx, &adaptation.RemoveContainerRequest{Pod: pod, Container: container})
	case "create":
		_, err = runtime.CreateContainer(ctx, &adaptation.CreateContainerRequest{Pod: pod, Container: container})
	case "stop-pod":
		err = runtime.StopPodSandbox(ctx, &adaptation.StopPodSandboxRequest{Pod: pod})
	default:
		err = fmt.Errorf("unknown call %q", method)
	}
	return err
}

func podOf(id string) *api.PodSandbox {
	return &api.PodSandbox{
		Id: "pod-" + id, Name: "web-" + id, Uid: "uid-" + id, Namespace: "shop",
		Labels:      map[string]string{"app": "web"},
		Annotations: map[string]string{"detour.io/exclude-containers": "app"},
		Linux: &api.LinuxPodSandbox{
			CgroupsPath: "/kubepods/pod-" + id,
			Namespaces: []*api.LinuxNamespace{
				{Type: "pid"}, {Type: "network", Path: "/var/run/netns/" + id},
			},
		},
		Pid: 4001,
	}
}

func containerOf(id string, state api.ContainerState, padding int) *api.Container {
	return &api.Container{
		Id: "container-" + id, PodSandboxId: "pod-" + id, Name: "app", State: state,
		Labels: map[string]string{"io.kubernetes.container.name": "app"},
		Args:   []string{"sleep", "inf"}, Env: []string{"PADDING=" + strings.Repeat("x", padding)},
		Linux: &api.LinuxContainer{CgroupsPath: "/kubepods/pod-" + id + "/container-" + id},
		Pid:   4002,
	}
}
