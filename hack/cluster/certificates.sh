# The certificates, keys and kubeconfigs of a cluster. Source it; do not run it.
# shellcheck shell=bash

# certificate NAME SUBJECT USAGE [ALTERNATIVE NAMES]
certificate() {
    openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2" 2>/dev/null
    openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -out "$1.crt" -extfile <(
        printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature,keyEncipherment\nextendedKeyUsage=%s\n' "$3"
        [[ -z ${4:-} ]] || printf 'subjectAltName=%s\n' "$4"
    ) 2>/dev/null
}

# kubeconfig NAME SUBJECT: contains its certificates, so that it is valid in each root directory.
kubeconfig() {
    certificate "$1" "$2" clientAuth
    cat >"$1.conf" <<EOF
apiVersion: v1
kind: Config
clusters: [{name: cluster, cluster: {server: "https://192.168.77.2:6443", certificate-authority-data: $(base64 -w 0 ca.crt)}}]
users: [{name: user, user: {client-certificate-data: $(base64 -w 0 "$1.crt"), client-key-data: $(base64 -w 0 "$1.key")}}]
contexts: [{name: context, context: {cluster: cluster, user: user}}]
current-context: context
EOF
}

# make_certificates DIRECTORY NODES
make_certificates() (
    local n names=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local
    umask 077
    cd "$1" || exit
    openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 365 -subj /CN=kubernetes \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature 2>/dev/null
    certificate apiserver /CN=kube-apiserver serverAuth "$names,IP:127.0.0.1,IP:10.96.0.1,IP:192.168.77.2"
    certificate apiserver-kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client clientAuth
    certificate front-proxy-client /CN=front-proxy-client clientAuth
    openssl genrsa -out service-account.key 2048 2>/dev/null
    openssl rsa -in service-account.key -pubout -out service-account.pub 2>/dev/null
    kubeconfig admin /O=system:masters/CN=admin
    kubeconfig kube-controller-manager /CN=system:kube-controller-manager
    kubeconfig kube-scheduler /CN=system:kube-scheduler
    kubeconfig kube-proxy /CN=system:kube-proxy
    for ((n = 1; n <= $2; n++)); do
        certificate "kubelet-server-node$n" "/O=system:nodes/CN=system:node:node$n" serverAuth "DNS:node$n,IP:192.168.77.$((n + 1))"
        kubeconfig "kubelet-node$n" "/O=system:nodes/CN=system:node:node$n"
    done
)
