// The endpoint of a kubelet for exec, with which the API server runs commands in containers. It runs them as processes
// in its own namespaces. Usage: kubelet PROGRAM ROOT
//
// PROGRAM replaces the container's program, such as /detour, and ROOT replaces the argument /host. The first line of
// output is the port on which it listens. With --version, it prints the version of Kubernetes.
package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/remotecommand"
	client "k8s.io/client-go/tools/remotecommand"
	server "k8s.io/kubelet/pkg/cri/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

// Set by the build.
var version string

type container struct{ program, root string }

func (c container) ExecInContainer(ctx context.Context, _ string, _ types.UID, name string, command []string,
	in io.Reader, out, errors io.WriteCloser, _ bool, _ <-chan client.TerminalSize, _ time.Duration) error {
	if name != "agent" {
		return fmt.Errorf("container not found (%q)", name)
	}
	process := exec.CommandContext(ctx, c.program)
	for _, argument := range command[1:] {
		if argument == "/host" {
			argument = c.root
		}
		process.Args = append(process.Args, argument)
	}
	process.Stdin, process.Stdout, process.Stderr = in, out, errors
	err := process.Run()
	if ended, ok := err.(*exec.ExitError); ok {
		return utilexec.CodeExitError{Err: err, Code: ended.ExitCode()}
	}
	return err
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == "--version" {
		fmt.Println("kubelet", version)
		return
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	template := x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour)}
	certificate, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	must(err)
	pair := tls.Certificate{Certificate: [][]byte{certificate}, PrivateKey: key}
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}})
	must(err)
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	// /exec/NAMESPACE/POD/CONTAINER
	must(http.Serve(listener, http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		path := strings.Split(strings.Trim(request.URL.Path, "/"), "/")
		if len(path) != 4 || path[0] != "exec" {
			http.NotFound(answer, request)
			return
		}
		options, err := server.NewOptions(request)
		if err != nil {
			http.Error(answer, err.Error(), http.StatusBadRequest)
			return
		}
		server.ServeExec(answer, request, container{os.Args[1], os.Args[2]}, path[2], "", path[3], request.URL.Query()["command"],
			options, time.Minute, time.Minute, remotecommand.SupportedStreamingProtocols)
	})))
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
